"""Routers in one launch: the door on a CPU, code of several generations, results on a GPU."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from pw_kernels import products, routers, step
from pw_kernels.pages import WeightPages
from pw_kernels.slots import Choice, chosen
from pw_kernels.step import Norm, Routing

nvrtc = pytest.importorskip("pw_kernels.nvrtc", reason="needs cuda-bindings")
cuda_routers = pytest.importorskip("pw_kernels.cuda_routers")
cuda_routing = pytest.importorskip("pw_kernels.cuda_routing")

INTERPRETED = os.environ["TRITON_INTERPRET"] == "1"
MODELS: list[tuple[int, int, int, int, dict[str, Any]]] = [  # experts, rows before, columns, k
    (60, 1, 2048, 4, {}),
    (128, 0, 2048, 8, {"normalize": True}),
    (8, 0, 4096, 2, {"score": "none"}),
]


def case(
    tokens: int, experts: int, first: int, cols: int, top_k: int, options: dict[str, Any],
    device: str = "cpu", dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor, Routing]:  # fmt: skip
    generator = torch.Generator(device).manual_seed(tokens)
    rows = -(-(first + experts) // 8) * 8
    shape: dict[str, Any] = {"device": device, "generator": generator}
    weight = (torch.randn(rows, cols, **shape) / cols**0.5).to(dtype)
    x = torch.randn(tokens, cols, **shape).to(dtype)
    routing = Routing(weight[first : first + experts], top_k, dtype, widened=True, **options)
    return x, weight, routing


@pytest.mark.parametrize("model", MODELS)
def test_elsewhere_a_product_and_a_choice_do_it(model: tuple[Any, ...]) -> None:
    x, weight, routing = case(9, *model)
    first = model[1]
    gain = torch.rand(x.shape[1]).to(x.dtype)
    ids, weights, others, normed = routers.choice(x, weight, first, routing, Norm(gain, 1e-6))
    assert torch.equal(normed, step.rms_norm(x, gain, 1e-6))
    product = products.product(normed, weight)
    expected = step.choose(product[:, first : first + model[0]], routing)
    assert isinstance(ids, Tensor)
    assert torch.equal(ids, expected[0])
    assert weights is not None
    assert torch.equal(weights, expected[1])
    assert torch.equal(others, product[:, :first])


@pytest.mark.parametrize("capability", [90, 100, 120])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("tokens", "norm"), [(4, True), (32, False)])
@pytest.mark.parametrize("size", [0, 8])
def test_compiles_ahead_of_time(
    capability: int, model: tuple[Any, ...], tokens: int, norm: bool, size: int
) -> None:
    _, weight, routing = case(32, *model)
    shape = (weight.shape[0], weight.shape[1])
    constants = cuda_routers.constants_of(
        shape, torch.bfloat16, model[1], tokens, routing, size, norm=norm
    )
    try:
        assert len(nvrtc.compile_source("router.cu", constants, capability)) > 1000
    except RuntimeError as error:  # cuda-bindings without the library that it binds
        pytest.skip(f"NVRTC is not installed: {error}")


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("size", [0, 8])
def test_the_choice_alone_compiles_ahead_of_time(capability: int, size: int) -> None:
    for tokens, model in itertools.product((4, 32), MODELS):
        routing = case(1, *model)[2]
        constants = cuda_routers.logits_constants(torch.float16, tokens, routing, size)
        try:
            assert len(nvrtc.compile_source("choice.cu", constants, capability)) > 1000
        except RuntimeError as error:
            pytest.skip(f"NVRTC is not installed: {error}")


def test_routers_that_do_something_else_are_left_to_others() -> None:
    routing = case(16, *MODELS[0])[2]
    assert cuda_routers.chooses(routing)
    others: tuple[dict[str, Any], ...] = (
        {"score": "sigmoid"}, {"groups": 4}, {"wide": True}, {"widened": False},
        {"bias": routing.weight[:, 0]}, {"choice_bias": routing.weight[:, 0]},
        {"expert_scale": routing.weight[:, 0]}, {"dtype": torch.float16},
    )  # fmt: skip
    for option in others:
        options: dict[str, Any] = {"dtype": torch.bfloat16, "widened": True} | option
        assert not cuda_routers.chooses(Routing(routing.weight, 4, **options))


@pytest.mark.parametrize(
    ("kilobytes", "tokens", "taken"), [(227, 64, 3), (99, 64, 2), (99, 16, 3), (227, 8, 3)]
)
def test_a_block_has_room(
    kilobytes: int, tokens: int, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvrtc, "shared_bytes", lambda _: kilobytes << 10)
    monkeypatch.setattr(nvrtc, "index_of", lambda _: 0)
    found = []
    for model in MODELS:
        x, weight, routing = case(tokens, *model)
        found.append(cuda_routers._has_room(x, weight, model[1], routing))
    assert sum(found) == taken


gpu = pytest.mark.gpu
on_a_gpu = pytest.mark.skipif(INTERPRETED, reason="needs TRITON_INTERPRET=0 and a GPU")


@gpu
@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tokens", [1, 8, 9, 32, 61])
def test_logits_are_those_of_the_products(
    tokens: int, model: tuple[Any, ...], dtype: torch.dtype
) -> None:
    x, weight, routing = case(tokens, *model, "cuda", dtype)
    first = model[1]
    gain = torch.rand(x.shape[1], device="cuda").to(dtype)
    ids, none, its, normed = routers.choice(x, weight, first, routing, Norm(gain, 1e-6))
    chosen(ids, none)
    near = {"rtol": 8e-3, "atol": 1e-6}
    torch.testing.assert_close(normed, step.rms_norm(x, gain, 1e-6), **near)
    x = normed
    ids, none, others, same = routers.choice(x, weight, first, routing)
    assert same is x
    assert isinstance(ids, Choice)
    assert none is None
    found = chosen(ids, none)
    product = torch.cat([products.product(part, weight, backend="cuda") for part in x.split(32)])
    logits = product[:, first : first + model[0]]
    few = [chosen(*routers.choose(part, routing)) for part in logits.split(4)]
    own = torch.cat([part[0] for part in few]), torch.cat([part[1] for part in few])
    more = chosen(*routers.choose(logits, routing))
    for expected in (own, more, step.choose(logits, routing, backend="triton")):
        assert torch.equal(found[0], expected[0])
        torch.testing.assert_close(found[1], expected[1], rtol=8e-3, atol=1e-6)
    assert torch.equal(others, product[:, :first])
    assert torch.equal(its, others)


@gpu
@on_a_gpu
@pytest.mark.parametrize("live", [None, 3])
@pytest.mark.parametrize("tokens", [4, 32])
def test_experts_get_the_same_lists(tokens: int, live: int | None) -> None:
    model = MODELS[0]
    x, weight, routing = case(tokens, *model, "cuda")
    logits = products.product(x, weight)[:, 1:61]
    experts = model[0]
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(2, 7, (2, experts), generator=generator).int().cuda()
    real = None if live is None else torch.tensor([live]).int().cuda()
    tables = torch.zeros(experts, 6, 1).int().cuda()
    modules = tuple(
        WeightPages(64, 64, own, tables, tables[:, 0].contiguous(), own * 512) for own in bits
    )
    assert len(modules) == 2
    found = []
    for way in ("router", "choice", "apart"):
        ids, weights = routers.choice(x, weight, 1, routing)[:2]
        if way != "router":  # at 32 tokens it is the door alone that makes it apart
            ids, weights = cuda_routers.choose(logits, routing), None
        assert isinstance(ids, Choice)
        if way == "apart":
            ids, weights = chosen(ids, weights)
        sums = torch.zeros(2, experts, device="cuda")
        routed = cuda_routing.route(ids, weights, modules, 8, 4, sums, real)
        listed = []
        for of_class in torch.stack(routed.work).flatten(0, 1).tolist():
            used = [entry for entry in of_class if entry[1] >= 0]
            listed.append(sorted((*e[1:], *sorted(routed.slots[e[0]].tolist())) for e in used))
        found.append((listed, routed.counts.tolist(), sums.tolist(), routed.progress.tolist()))
    assert found[0][:2] == found[1][:2] == found[2][:2]
    assert found[1] == found[2]
    assert sum(found[0][1]) == 4 * (tokens if live is None else live)
