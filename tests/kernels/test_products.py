"""Products of few rows: the door on a CPU, code for three generations, and results on a GPU."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from pw_kernels import products
from pw_kernels.product_plans import NORM_STEPS, STEP, WARPS, choose_plan, constants_of
from pw_kernels.step import Norm

INTERPRETED = os.environ["TRITON_INTERPRET"] == "1"
ROOM = 227 << 10  # bytes of shared memory that a block may have at most


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def normed(x: Tensor, norm: Norm) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + norm.epsilon).rsqrt() * norm.weight


def test_what_a_product_takes_along() -> None:
    x, weight, bias = random(3, 16), random(6, 16, seed=1), random(6, seed=2)
    norm, add = Norm(random(16, seed=3), 1e-5), [random(3, 6, seed=4), random(3, 6, seed=5)]
    share = random(3, 1, seed=6)
    plain = linear(normed(x, norm), weight, bias)
    near = torch.testing.assert_close
    near(products.product(x, weight, bias, norm=norm), plain)
    near(products.product(x, weight, bias, norm=norm, add=add[:1]), add[0] + plain)
    near(products.product(x, weight, bias, norm=norm, add=add), add[0] + add[1] + plain)
    near(
        products.product(x, weight, bias, norm=norm, add=add, share=share),
        add[0] + add[1] + share.sigmoid() * plain,
    )
    gated = products.gated_product(x, weight, 2, "silu", bias, norm=norm)
    near(gated.out, silu(plain[:, :2]) * plain[:, 2:4])
    near(gated.rest, plain[:, 4:])
    near(gated.normed, normed(x, norm))
    nothing = products.gated_product(x, weight, 0, "silu", bias)
    assert nothing.out.shape == (3, 0)
    near(nothing.rest, linear(x, weight, bias))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="backend must be one of"):
        products.product(random(1, 32), random(2, 32), backend="triton")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"cannot multiply \[1, 32\] by \[2, 32\] on cpu"):
            products.product(random(1, 32), random(2, 32), backend="cuda")


@pytest.mark.parametrize(("tokens", "norm"), [(8, False), (8, True), (9, False), (32, False)])
@pytest.mark.parametrize("rows", [64, 6144, 11328])
@pytest.mark.parametrize("cols", [32, 512, 2048, 2816, 4096, 5632, 8192, 14336])
def test_a_plan_fits_a_multiprocessor(rows: int, cols: int, tokens: int, norm: bool) -> None:
    norm = norm and cols <= WARPS * NORM_STEPS * STEP
    plan = choose_plan(tokens, (rows, cols), norm)
    assert plan.tiles * 8 >= tokens
    steps = -(-(cols // STEP) // plan.warps)
    assert plan.stages <= steps
    assert plan.turn <= NORM_STEPS
    assert plan.turn == steps or not norm
    assert plan.blocks * (plan.shared_bytes(cols, norm) + 1024) <= ROOM + 1024
    assert plan.blocks * plan.warps * 32 <= 1024


def test_many_rows_are_taken_in_one_round() -> None:
    heights = {
        (tokens, rows): choose_plan(tokens, (rows, 2048), norm=True, inner=inner).height
        for rows, inner in ((2048, 0), (6144, 0), (11328, 5632))
        for tokens in (1, 8)
    }
    assert heights == {
        (1, 2048): 1, (8, 2048): 1, (1, 6144): 3, (8, 6144): 2, (1, 11328): 3, (8, 11328): 3,
    }  # fmt: skip


def test_rows_of_4096_columns_are_taken_in_one_round() -> None:
    for tokens in (1, 8):
        plan = choose_plan(tokens, (6144, 4096), norm=True)
        assert (plan.warps, plan.height, plan.grid(6144, 0)) == (16, 3, 128)
        plan = choose_plan(tokens, (4096, 4096), norm=False)
        assert (plan.warps, plan.blocks, plan.grid(4096, 0)) == (16, 1, 128)
        plan = choose_plan(tokens, (4224, 2816), norm=False, inner=2112)
        assert (plan.warps, plan.height, plan.grid(4224, 2112)) == (16, 2, 132)
        heights = [
            choose_plan(tokens, (rows, 2816), norm=False).height for rows in (2112, 8192, 9216)
        ]
        assert heights == [1, 2, 1]  # of 9216 a third round would be a fifth full
    for tokens in (9, 16):  # the order of sums changes with the blocks of fewer and more alone
        assert choose_plan(tokens, (2048, 5632), False, beside=True) == choose_plan(
            tokens, (2048, 5632), False
        )
    plan = choose_plan(32, (2048, 5632), norm=False, beside=True)
    assert 3 * plan.shared_bytes(5632, norm=False) < ROOM / 2  # small enough to find a place
    plan = choose_plan(8, (2048, 5632), norm=False, beside=True)
    assert plan == choose_plan(1, (2048, 5632), norm=False, beside=True)
    assert (plan.warps, plan.shared_bytes(5632, norm=False)) == (4, 32 << 10)
    plan = choose_plan(1, (11264, 2048), True, 5632, beside=True)
    assert (plan.warps, plan.height, plan.blocks) == (8, 2, 3)
    assert choose_plan(1, (11264, 2048), True, 5632, 99 << 10, beside=True).height == 1
    less = choose_plan(1, (6144, 4096), norm=True, room=163 << 10)
    assert less.height == 1


@pytest.mark.parametrize(("kilobytes", "most"), [(227, 14336), (163, 5120), (99, 3072)])
def test_torch_takes_what_the_device_has_no_room_for(
    kilobytes: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = pytest.importorskip("pw_kernels.cuda_products", reason="needs cuda-bindings")
    monkeypatch.setattr(kernels.nvrtc, "shared_bytes", lambda _: kilobytes << 10)
    rows = [torch.empty(8, cols) for cols in range(STEP, 14337, STEP)]
    monkeypatch.setattr(kernels.nvrtc, "index_of", lambda _: 0)
    taken = [x for x in rows if kernels._plan_with_room(x, x, False, 0, False) is not None]
    assert taken[-1].shape[1] == most
    for x in filter(kernels.norms, rows):
        weight = torch.empty(11328, x.shape[1], device="meta")
        assert kernels._plan_with_room(x, weight, True, 0, False) is not None


@pytest.mark.parametrize("rows", [2048, 4096, 6144])
@pytest.mark.parametrize("kilobytes", [227, 163, 99])
def test_what_is_launched_has_room_on_the_device(
    rows: int, kilobytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 4096 rows two blocks share a multiprocessor only where both have room."""
    kernels = pytest.importorskip("pw_kernels.cuda_products", reason="needs cuda-bindings")
    asked = []

    class Kernel:
        def launch(self, _grid: Any, _threads: int, shared: int, *_: Any, overlap: bool) -> None:
            assert overlap
            asked.append(shared)

    monkeypatch.setattr(kernels, "_fits", lambda *_: True)
    monkeypatch.setattr(kernels.nvrtc, "index_of", lambda _: 0)
    monkeypatch.setattr(kernels.nvrtc, "shared_bytes", lambda _: kilobytes << 10)
    monkeypatch.setattr(kernels.nvrtc, "kernel", lambda *_: Kernel())
    taken = set()
    for cols in (2048, 2816, 4096, 5632, 14336):
        weight = torch.empty(rows, cols, dtype=torch.bfloat16)
        norm = Norm(torch.empty(cols, dtype=torch.bfloat16), 1e-5)
        for tokens, before, beside in (
            (1, None, False), (8, None, False), (8, norm, False), (32, None, False),
            (32, None, True), (8, None, True), (8, norm, True),
        ):  # fmt: skip
            x = torch.zeros(tokens, cols, dtype=torch.bfloat16)
            try:
                products.product(x, weight, norm=before, beside=beside, backend="cuda")
            except ValueError:
                assert not beside
            else:
                if not beside:
                    taken.add((cols, tokens, before is not None))
    assert max(asked) <= kilobytes << 10
    assert (4096, 8, True) in taken
    assert ((4096, 8, False) in taken) == (kilobytes > 99)  # 128 KB of copies


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_compiles_ahead_of_time(capability: int) -> None:
    nvrtc = pytest.importorskip("pw_kernels.nvrtc", reason="needs cuda-bindings")
    shapes: list[tuple[int, int, dict[str, int]]] = [
        (6144, 2048, {"NORM": 1, "BIAS": 1}),
        (2048, 5632, {"ADD": 3}),
        (11328, 2048, {"NORM": 1, "GATED": 1, "INNER": 5632, "KIND": 2}),
        (2048, 2048, {"ADD": 1, "FLOAT16": 1}),
        (2048, 14336, {"ADD": 2}),
        (6144, 4096, {"NORM": 1}),
        (4096, 4096, {"ADD": 1}),
    ]
    for (rows, cols, more), tokens in zip(shapes, (8, 8, 8, 32, 9, 1, 1), strict=True):
        plan = choose_plan(
            8 if "NORM" in more else tokens, (rows, cols), "NORM" in more, more.get("INNER", 0)
        )
        defines = constants_of(plan, (rows, cols), torch.bfloat16, bias=False, norm=False) | more
        try:
            code = nvrtc.compile_source("products.cu", defines, capability)
        except RuntimeError as error:  # cuda-bindings without the library that it binds
            pytest.skip(f"NVRTC is not installed: {error}")
        assert len(code) > 1000


FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True, "norm": True},
    "residual": {"add": 1},
    "two sums": {"add": 2, "bias": True},
    "two sums and a share": {"add": 2, "share": True},
}


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs TRITON_INTERPRET=0 and a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rows", "cols"), [(6144, 2048), (2056, 2816), (1000, 5632), (520, 14336)])
def test_on_a_gpu(rows: int, cols: int, form: str, dtype: torch.dtype) -> None:
    """And captured in a graph; a token has the same result in every batch of up to 8."""
    options, tokens = FORMS[form], 8
    x = random(tokens, cols, dtype=dtype).cuda()
    weight = (random(rows, cols, seed=1) / cols**0.5).to(dtype).cuda()
    bias = random(rows, seed=2, dtype=dtype).cuda() if "bias" in options else None
    norm = Norm(random(cols, seed=3, dtype=dtype).cuda(), 1e-6) if "norm" in options else None
    sums = range(options.get("add", 0))
    add = [random(tokens, rows, seed=4 + i, dtype=dtype).cuda() for i in sums]
    share = random(tokens, 3, seed=6, dtype=dtype).cuda()[:, 1:2] if "share" in options else None

    def run(count: int, backend: str) -> Tensor:
        return products.product(
            x[:count], weight, bias, norm=norm, add=[part[:count] for part in add],
            share=None if share is None else share[:count], backend=backend,
        )  # fmt: skip

    torch.cuda.synchronize()
    found = run(tokens, "cuda")
    difference = (found.float() - run(tokens, "torch").float()).norm()
    assert difference <= 4e-3 * found.float().norm()
    for count in (1, 2, 5):
        assert torch.equal(run(count, "cuda"), found[:count])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = run(tokens, "cuda")
    graph.replay()
    assert torch.equal(again, found)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs TRITON_INTERPRET=0 and a GPU")
@pytest.mark.parametrize("tokens", [9, 16, 32])
@pytest.mark.parametrize(("rows", "cols"), [(2048, 2048), (64, 2048), (520, 5632)])
def test_some_tokens_and_a_small_weight_on_a_gpu(rows: int, cols: int, tokens: int) -> None:
    """As many tokens as there may be have the result of few."""
    dtype = torch.bfloat16
    x, add = random(tokens, cols, dtype=dtype).cuda(), random(tokens, rows, dtype=dtype).cuda()
    weight = (random(rows, cols, seed=1) / cols**0.5).to(dtype).cuda()
    torch.cuda.synchronize()
    found, expected = (
        products.product(x, weight, add=(add,), backend=backend) for backend in ("cuda", "torch")
    )
    assert (found.float() - expected.float()).norm() <= 4e-3 * expected.float().norm()
    few = products.product(x[:8], weight, add=(add[:8],), backend="cuda")
    assert torch.equal(found[:8], few)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs TRITON_INTERPRET=0 and a GPU")
@pytest.mark.parametrize("tokens", [17, 32])
def test_a_product_beside_others_on_a_gpu(tokens: int) -> None:
    dtype = torch.bfloat16
    x = random(tokens, 5632, dtype=dtype).cuda()
    weight = (random(2048, 5632, seed=1) / 75).to(dtype).cuda()
    torch.cuda.synchronize()
    assert products._launch("auto", x, weight, norm=False) is None
    assert products._launch("auto", x, weight, norm=False, beside=True) is not None
    found, expected = (products.product(x, weight, beside=beside) for beside in (True, False))
    assert (found.float() - expected.float()).norm() <= 4e-3 * expected.float().norm()


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs TRITON_INTERPRET=0 and a GPU")
@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize("inner", [0, 1408])
def test_a_gated_product_on_a_gpu(inner: int, tokens: int) -> None:
    dtype = torch.bfloat16
    x, norm = random(tokens, 2048, dtype=dtype).cuda(), Norm(random(2048).to(dtype).cuda(), 1e-6)
    weight = (random(2 * inner + 61, 2048, seed=1) / 45).to(dtype).cuda()
    torch.cuda.synchronize()
    found, expected = (
        products.gated_product(x, weight, inner, "silu", norm=norm, backend=backend)
        for backend in ("cuda", "torch")
    )
    for one, other in zip(found, expected, strict=True):
        assert (one.float() - other.float()).norm() <= 4e-3 * other.float().norm()
