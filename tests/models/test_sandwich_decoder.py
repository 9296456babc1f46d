"""Gemma 4's flat pass: its branches on two streams, and models that it leaves alone."""

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

from pw.models import beside, probing, sandwich
from pw.models.beside import opened
from pw.models.checkpoint import Checkpoint
from pw.models.probing import probe_logits, relative_difference
from pw.models.sandwich import SandwichDecoder
from pw.models.skeleton import general_forward, load_skeleton
from pw.models.testing import make_checkpoint
from pw_kernels import products

INTERPRETED = os.environ["TRITON_INTERPRET"] == "1"


class Log:
    """A place beside, which notes when launches go there, what they are, and when all meet."""

    def __init__(self) -> None:
        self.open, self.events = True, list[str]()

    @contextmanager
    def apart(self) -> Iterator[None]:
        self.events.append("apart")
        yield
        self.events.append("back")

    def meet(self) -> None:
        self.events.append("meet")


def load(folder: Path, **settings: Any) -> Any:
    make_checkpoint("gemma4_text", folder, **settings)
    return load_skeleton(Checkpoint.open(folder), torch.float32).model


@pytest.mark.parametrize("few", [False, True])
def test_branches_on_two_streams(
    few: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of some tokens the MLP goes apart; of few the experts do, if a launch waits itself."""
    model, log = load(tmp_path), Log()
    flat = SandwichDecoder(model, kernels=True)
    for layer in flat._layers:
        layer._urgent, layer._beside = (log, None) if few else (None, log)
    monkeypatch.setattr(beside, "FEWEST", 4)
    product = products.product

    def noted(*args: Any, **options: Any) -> Any:
        log.events += ["beside"] * bool(options.get("beside"))
        return product(*args, **options)

    monkeypatch.setattr(products, "product", noted)
    general = partial(general_forward, model)
    order = ["apart", "back", "beside", "meet"] if few else ["apart", "beside", "back", "meet"]
    for taken in (False, True):
        if taken:
            monkeypatch.setattr(sandwich._Layer, "_takes_few", lambda *_: True)
        log.events.clear()
        expected, found = probe_logits(model, general, flat)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)
        assert log.events == order * len(flat._layers) * (taken or not few)
    log.open = False
    log.events.clear()
    probe_logits(model, flat)
    assert not log.events


def test_keys_that_layers_share_and_inputs_of_layers_are_left_to_the_general_pass(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_checkpoint("gemma4_shared", tmp_path)
    assert load_skeleton(Checkpoint.open(tmp_path), torch.float32).flat is None
    assert "no flat forward pass for `gemma4_text`: layers share keys" in caplog.text


def test_norms_that_differ_and_routers_that_do_something_else_are_refused(tmp_path: Path) -> None:
    model = load(tmp_path)
    layer = model.model.layers[1]
    layer.post_feedforward_layernorm.eps = 0.5
    with pytest.raises(ValueError, match="norms of a layer add"):
        SandwichDecoder(model)
    layer.post_feedforward_layernorm.eps = layer.input_layernorm.eps
    own = type(layer.router).forward

    class Halved(type(layer.router)):  # type: ignore[misc]
        def forward(self, hidden: Any) -> Any:
            logits, weights, ids = own(self, hidden)
            return logits, weights / 2, ids

    layer.router.__class__ = Halved
    with pytest.raises(ValueError, match="router does something else"):
        SandwichDecoder(model)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs TRITON_INTERPRET=0 and a GPU")
@pytest.mark.parametrize("tokens", [1, 3, 8, 16])
def test_streams_of_a_graph_meet(tokens: int, tmp_path: Path) -> None:
    make_checkpoint("gemma4_text", tmp_path)
    skeleton = load_skeleton(Checkpoint.open(tmp_path), torch.bfloat16, "cuda")
    skeleton.bind_experts(lambda _, __, x, ids, weights: x * weights.sum(1, keepdim=True).to(x))
    flat: Any = skeleton.flat
    context: Any = probing._ProbeContext(probing._kv_heads(skeleton.model))
    ids = torch.arange(1, tokens + 1, device="cuda")  # 0 is padding, whose embedding is zero
    positions, keep = torch.zeros_like(ids), torch.arange(tokens, device="cuda")
    router = torch.zeros(tokens, skeleton.hidden_size, device="cuda", dtype=torch.bfloat16)
    assert all(layer._takes_few(router) == (tokens <= 8) for layer in flat._layers)

    def run() -> Tensor:
        logits: Tensor = flat(ids, positions, context, keep)
        return logits

    with torch.inference_mode():
        with opened(skeleton.device):
            run()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = run()
        for turn in range(20):
            positions.fill_(turn)
            graph.replay()
            assert relative_difference(found.float(), run().float()) <= 1e-2
