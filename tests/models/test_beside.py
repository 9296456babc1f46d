"""Shared experts beside the routed ones: which blocks, in which order, with what result."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pw.models import beside, skeleton
from pw.models.beside import fork_shared_experts, opened
from pw.models.checkpoint import Checkpoint
from pw.models.experts import expert_modules
from pw.models.flat import FlatDecoder
from pw.models.probing import probe_logits, relative_difference
from pw.models.skeleton import general_forward, load_skeleton
from pw.models.testing import KINDS, make_checkpoint

INTERPRETED = os.environ["TRITON_INTERPRET"] == "1"
FORKED = {"deepseek_v2", "deepseek_v3", "glm4_moe"}


class Log:
    """Stands in for a stream: notes what happens."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.open = True

    @contextmanager
    def apart(self) -> Iterator[None]:
        self.events.append("apart")
        yield
        self.events.append("launched")

    def meet(self) -> None:
        self.events.append("meet")


def load(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(skeleton, "flat_decoder", lambda *_: None)
    make_checkpoint(kind, folder)
    return load_skeleton(Checkpoint.open(folder), torch.float32).model


def logits(model: Any) -> Tensor:
    return probe_logits(model, partial(general_forward, model))[0]


@pytest.mark.parametrize("kind", KINDS)
def test_shared_experts_are_launched_first_where_they_come_last(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, log = load(kind, tmp_path, monkeypatch), Log()
    before = logits(model)
    layers = len(expert_modules(model))
    expected = layers if kind in FORKED else 0
    assert fork_shared_experts(model, partial(general_forward, model), log) == expected
    assert log.events.count("meet") == expected
    log.events.clear()
    monkeypatch.setattr(beside, "FEWEST", 4)
    for _, module in expert_modules(model)[:1]:
        module.register_forward_pre_hook(lambda *_: log.events.append("routed"))
    assert torch.equal(logits(model), before)
    if expected:
        assert log.events[:4] == ["apart", "launched", "routed", "meet"]
        assert len(log.events) == 3 * layers + 1
    for closed in (True, False):
        log.open = not closed
        monkeypatch.setattr(beside, "MOST", 64 if closed else 2)
        log.events.clear()
        assert torch.equal(logits(model), before)
        assert set(log.events) <= {"routed"}


def test_a_fork_that_changes_logits_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, log = load("glm4_moe", tmp_path, monkeypatch), Log()
    before = logits(model)
    taken = beside._Fork._taken
    monkeypatch.setattr(beside._Fork, "_taken", lambda self, x: 1.1 * taken(self, x))
    assert fork_shared_experts(model, partial(general_forward, model), log) == 0
    assert "shared experts of `glm4_moe` wait for the routed: logits differ by" in caplog.text
    log.events.clear()
    assert torch.equal(logits(model), before)
    assert not log.events


def test_a_call_that_broke_leaves_nothing_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, log = load("glm4_moe", tmp_path, monkeypatch), Log()
    assert fork_shared_experts(model, partial(general_forward, model), log)
    monkeypatch.setattr(beside, "FEWEST", 4)
    before = logits(model)

    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    hook = expert_modules(model)[0][1].register_forward_pre_hook(broken)
    with pytest.raises(RuntimeError, match="broken"):
        logits(model)
    hook.remove()
    log.open = False
    log.events.clear()
    assert torch.equal(logits(model), before)
    assert not log.events


def test_a_rank_s_part_stays_on_one_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, log = load("deepseek_v3", tmp_path, monkeypatch), Log()
    for name, _ in expert_modules(model):
        block = model.get_submodule(name.rpartition(".")[0])
        block.shared_experts.down_proj.__dict__["pw_reduce"] = None
    assert fork_shared_experts(model, partial(general_forward, model), log) == 0
    assert not log.events


@pytest.mark.parametrize("kept", [False, True])
def test_the_flat_pass_with_its_shared_experts_beside(
    kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a step: each layer launches them first, and streams meet once."""
    model, log = load("qwen2_moe", tmp_path, monkeypatch), Log()
    flat = FlatDecoder(model, kernels=True)
    for layer in flat._layers:
        layer._mlp._beside = log
    monkeypatch.setattr(beside, "FEWEST", 4)

    def forward(ids: Tensor, positions: Tensor, context: Any, keep: Tensor) -> Tensor:
        if kept:
            return flat(ids, positions, context, keep)
        return flat.logits(flat.hidden(ids, positions, context).index_select(0, keep))

    expected, found = probe_logits(model, partial(general_forward, model), forward)
    assert log.events == ["apart", "launched", "meet"] * len(flat._layers)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)


def test_a_device_has_one_other_stream_whatever_it_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: object())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 7)
    stream = beside.side_stream(torch.device("cuda:7"))
    with opened(torch.device("cuda")):
        assert stream is not None
        assert stream.open
    assert beside.side_stream(torch.device("cuda:8")) is not stream
    assert beside.side_stream(torch.device("cpu")) is None


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs TRITON_INTERPRET=0 and a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [*sorted(FORKED), "qwen2_moe"])
def test_streams_meet_on_a_gpu(
    kind: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(kind, tmp_path)
    skeleton = load_skeleton(Checkpoint.open(tmp_path), dtype, "cuda")
    forwards: list[Any] = [partial(general_forward, skeleton.model)]
    if skeleton.flat is not None:
        forwards.append(skeleton.flat)
    events: list[str] = []
    apart = beside.SideStream.apart

    @contextmanager
    def noted(self: beside.SideStream) -> Iterator[None]:
        events.append("apart")
        with apart(self):
            yield

    monkeypatch.setattr(beside.SideStream, "apart", noted)
    monkeypatch.setattr(beside, "FEWEST", 4)
    with opened(skeleton.device):
        found = [probe_logits(skeleton.model, *forwards)[-1] for _ in range(10)]
    assert len(events) == 10 * len(expert_modules(skeleton.model))
    expected = probe_logits(skeleton.model, *forwards)[-1]
    for logits in found:
        assert relative_difference(logits, expected) <= (1e-5 if dtype == torch.float32 else 1e-2)
