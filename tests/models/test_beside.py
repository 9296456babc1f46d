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

from pw.models import beside, flat_parts, sandwich, skeleton
from pw.models.beside import fork_shared_experts, opened
from pw.models.checkpoint import Checkpoint
from pw.models.experts import expert_modules
from pw.models.flat import DECODERS, FlatDecoder
from pw.models.flat_parts import GatedMlp, Moe
from pw.models.probing import probe_logits, relative_difference
from pw.models.skeleton import general_forward, load_skeleton
from pw.models.testing import KINDS, make_checkpoint
from pw_kernels import routers

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


def load(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Any:
    monkeypatch.setattr(skeleton, "flat_decoder", lambda *_: None)
    make_checkpoint(kind, folder, **settings)
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


def test_few_tokens_have_their_routed_experts_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, log = load("qwen2_moe", tmp_path, monkeypatch), Log()
    flat = FlatDecoder(model, kernels=True)
    for layer in flat._layers:
        layer._mlp._urgent = log
    for taken in (False, True):  # on a CPU it is more than one launch
        if taken:
            monkeypatch.setattr(Moe, "_takes_few", lambda *_: True)
        expected, found = probe_logits(model, partial(general_forward, model), flat)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)
        assert log.events == ["apart", "launched", "meet"] * len(flat._layers) * taken
    log.events.clear()
    log.open = False
    probe_logits(model, flat)
    assert not log.events


@pytest.mark.parametrize(("kind", "name"), [("qwen2_moe", "hidden_act"),
                                            ("gemma4_text", "hidden_activation")])  # fmt: skip
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_an_activation_that_kernels_do_not_know_keeps_one_stream(
    kind: str, name: str, activation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log()
    for module in (flat_parts, sandwich):
        monkeypatch.setattr(module, "side_stream", lambda *_, **__: log)
    monkeypatch.setattr(beside, "FEWEST", 4)
    model = load(kind, tmp_path, monkeypatch, **{name: activation})
    flat = DECODERS[kind](model, kernels=True)
    expected, found = probe_logits(model, partial(general_forward, model), flat)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)
    assert bool(log.events) == (activation == "silu")


def test_a_device_has_one_other_stream_whatever_it_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda _, priority: priority)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 7)
    stream = beside.side_stream(torch.device("cuda:7"))
    urgent = beside.side_stream(torch.device("cuda:7"), urgent=True)
    assert stream is not None
    assert urgent is not None
    with opened(torch.device("cuda")):
        assert stream.open
        assert urgent.open
    assert not stream.open
    assert not urgent.open
    assert urgent._stream < stream._stream  # the first to go
    assert beside.side_stream(torch.device("cuda:8")) is not stream
    assert beside.side_stream(torch.device("cpu")) is None


@pytest.mark.parametrize(("tokens", "taken"), [(1, False), (2, True), (8, True), (9, False)])
def test_one_token_keeps_one_stream(
    tokens: int, taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load("qwen2_moe", tmp_path, monkeypatch)
    monkeypatch.setattr(routers, "is_one_launch", lambda *_: True)  # as on a GPU
    monkeypatch.setattr(GatedMlp, "takes_norm", lambda *_: True)
    moe = FlatDecoder(model, kernels=True)._layers[0]._mlp
    assert moe._takes_few(torch.zeros(tokens, 8), moe._gated) == taken


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs TRITON_INTERPRET=0 and a GPU")
@pytest.mark.parametrize("tokens", [2, 3, 8])
def test_few_tokens_on_two_streams_of_a_graph(tokens: int, tmp_path: Path) -> None:
    make_checkpoint("qwen2_moe", tmp_path)
    skeleton = load_skeleton(Checkpoint.open(tmp_path), torch.bfloat16, "cuda")
    skeleton.bind_experts(lambda _, __, x, ids, weights: x * weights.sum(1, keepdim=True).to(x))
    assert skeleton.flat is not None
    layers = [layer._mlp for layer in skeleton.flat._layers]
    size = skeleton.model.config.hidden_size
    x = torch.randn(tokens, size, device="cuda", dtype=torch.bfloat16)
    assert all(layer._takes_few(x, layer._gated) for layer in layers)

    def run() -> Tensor:
        y = x
        for layer in layers * 4:
            y = layer(y) / 2
        return y

    with torch.inference_mode(), opened(skeleton.device):
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run()
    for _ in range(20):
        x.mul_(-0.9)
        graph.replay()
        with torch.inference_mode():
            assert relative_difference(found.float(), run().float()) <= 1e-2


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
