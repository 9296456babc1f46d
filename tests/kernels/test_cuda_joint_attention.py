"""Joint decode attention: its door, code for two generations, plans, and results on a GPU."""

from __future__ import annotations

import os
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from pw_kernels import dispatch, joint_attention, reference, step
from pw_kernels.joint_attention_plans import (
    MOST_GROUP,
    SIZES,
    Plan,
    choose_plan,
    constants_of,
    shared_bytes,
)

nvrtc = pytest.importorskip("pw_kernels.nvrtc", reason="needs cuda-bindings")
cuda = pytest.importorskip("pw_kernels.cuda_joint_attention")

INTERPRETED = os.environ["TRITON_INTERPRET"] == "1"
SHAPES = [
    (16, 16, 128), (32, 8, 128), (32, 4, 128), (16, 8, 256), (12, 4, 64), (16, 2, 512)
]  # fmt: skip


class Step:
    """A decode step over scattered pages, whose last sequence is padding.

    Args:
        lengths: With the new key.
        heads: Hq.
        kv_heads: Hkv.
        size: D.
        dtype: Of everything.
        device: Where.
        normed: 0, 1: queries and keys, 2: values, too.
        shared: Values are the keys.
    """

    def __init__(
        self,
        lengths: list[int],
        heads: int,
        kv_heads: int,
        size: int,
        dtype: torch.dtype,
        device: str,
        normed: int = 0,
        shared: bool = False,
    ) -> None:
        page_tokens, count = 4, len(lengths)
        blocks = -(-max(lengths) // page_tokens)
        generator = torch.Generator(device).manual_seed(size)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, generator=generator).to(dtype)

        self.arena = random(count * blocks + 3, 2, page_tokens, kv_heads, size)
        order = torch.randperm(len(self.arena), device=device, generator=generator)
        tables = order[: count * blocks].int().view(count, blocks)
        starts = torch.arange(count + 1, device=device).int().clamp(max=count - 1)
        lens = torch.tensor(lengths, device=device).int()
        last = (lens - 1).long()
        slots = tables.gather(1, (last // page_tokens)[:, None])[:, 0] * page_tokens
        slots = slots.long() + last % page_tokens
        slots[-1] = -1
        self.slots, self.where = slots, (tables, starts, lens)
        self.rows = random(count, (heads + (1 if shared else 2) * kv_heads) * size)
        self.cos, self.sin = random(2, count, size)
        rows = [0, heads + kv_heads, heads + 2 * kv_heads][normed]
        self.more: dict[str, Any] = {"epsilon": 1e-5, "shared_values": shared}
        if rows:
            self.more["norm"] = random(rows, size)

    def given(self) -> tuple[Tensor, ...]:
        """Arguments up to the pages."""
        return self.rows, self.cos, self.sin, self.arena[:, 0], self.arena[:, 1]

    def run(self, **options: Any) -> tuple[Tensor, Tensor]:
        """The kernel's result, and the arena as it leaves it; this one stays as it is."""
        before = self.arena.clone()
        found = cuda.attend(*self.given(), *self.where, scale=0.1, **self.more, **options)
        after, self.arena[:] = self.arena.clone(), before
        return found, after

    def expected(self, **options: Any) -> tuple[Tensor, Tensor]:
        arena = self.arena.clone()
        pages = arena[:, 0], arena[:, 1]
        q = step.rotate_store(
            self.rows, self.cos, self.sin, *pages, self.slots, head_size=self.cos.shape[1],
            backend="torch", **self.more,
        )  # fmt: skip
        return reference.paged_attention(q, *pages, *self.where, scale=0.1, **options), arena


def near(found: Tensor, want: Tensor) -> bool:
    return bool((found.float() - want.float()).norm() <= 1e-2 * want.float().norm())


@pytest.mark.parametrize("options", [{}, {"window": 6}, {"softcap": 2.0}])
def test_without_a_kernel_the_door_takes_the_parts(options: dict[str, Any]) -> None:
    case = Step([9, 1, 17, 4], 4, 2, 16, torch.float32, "cpu", normed=1)
    want, arena = case.expected(**options)
    found = joint_attention.attend(
        *case.given(), case.slots, *case.where, head_size=16, scale=0.1, **case.more, **options
    )
    assert torch.allclose(found, want, atol=1e-5)
    assert torch.equal(case.arena, arena)


def test_the_kernel_takes_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(nvrtc, "shared_bytes", lambda _: 227 << 10)
    monkeypatch.setattr(nvrtc, "index_of", lambda _: 0)
    monkeypatch.setattr(cuda, "_on_a_gpu", lambda _: True)
    case = Step([9, 5], 4, 2, 64, torch.bfloat16, "cpu", normed=1)
    rows, cos, sin, keys, values = case.given()
    tables, norm = case.where[0], case.more["norm"]

    def fits(**other: Any) -> bool:
        given = {"qkv": rows, "cos": cos, "sin": sin, "k_pages": keys, "v_pages": values}
        given |= {"block_tables": tables, "norm": norm, "shared_values": False}
        return bool(cuda.fits(**(given | other)))

    assert fits()
    assert fits(norm=None)
    assert not fits(norm=norm.float())
    assert not fits(norm=norm.t().contiguous().t())
    assert not fits(sin=sin.float())
    assert not fits(sin=sin.t().contiguous().t())
    assert not fits(cos=cos[:, :32], sin=sin[:, :32])
    assert not fits(block_tables=tables[:1])
    assert not fits(block_tables=tables.t().contiguous().t())
    assert not fits(v_pages=values.float())
    assert not fits(qkv=rows.float())
    monkeypatch.setattr(nvrtc, "shared_bytes", lambda _: 32 << 10)
    assert not fits()


@pytest.mark.parametrize(
    ("capability", "shapes"), [(90, SHAPES[2:4]), (100, SHAPES[5:]), (120, SHAPES[4:5])]
)
def test_compiles_ahead_of_time(capability: int, shapes: list[tuple[int, int, int]]) -> None:
    for heads, kv_heads, size in shapes:
        plan = choose_plan(1, heads, kv_heads, size)
        assert plan is not None
        constants = constants_of(plan, heads, kv_heads, size, 16, torch.bfloat16)
        normed = (heads + 2 * kv_heads) * int(size > 64)
        constants |= {"NORMED": normed, "SHARED": int(size == 64), "WINDOW": 1, "SOFTCAP": 1}
        try:
            code = nvrtc.compile_source("joint_attention.cu", constants, capability)
        except RuntimeError as error:  # cuda-bindings without the library that it binds
            pytest.skip(f"NVRTC is not installed: {error}")
        assert len(code) > 1000


def test_plans_have_room_and_fill_no_device_twice() -> None:
    for group, kv_heads, size in product(range(1, MOST_GROUP + 1), (1, 2, 4, 8, 16, 40), SIZES):
        for tokens in range(1, 200):
            plan = choose_plan(tokens, group * kv_heads, kv_heads, size)
            if plan is None:
                assert tokens * kv_heads > 66
                continue
            constants = constants_of(plan, group * kv_heads, kv_heads, size, 4, torch.bfloat16)
            assert plan.blocks * (shared_bytes(constants) + 1024) <= 228 << 10
            assert tokens * kv_heads * plan.cluster <= 132 * plan.blocks
            assert group * (size + 4) * 4 <= plan.units * 32 * min(size, 128)
            assert group * size // 4 % plan.cluster == 0
    assert choose_plan(1, 9, 1, 128) is None
    assert choose_plan(1, 8, 8, 96) is None


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "plans"),
    [
        (16, 16, 128, {1: (8, 3, 2), 2: (4, 3, 2), 4: (2, 4, 1), 8: (2, 3, 2), 16: None}),
        (32, 8, 128, {1: (8, 3, 2), 4: (4, 3, 2), 8: (2, 4, 1), 16: (2, 3, 2), 32: None}),
        (
            32,
            4,
            128,
            {1: (8, 3, 2), 4: (8, 3, 2), 8: (4, 3, 2), 16: (2, 4, 1), 32: (2, 3, 2), 64: None},
        ),
        (16, 8, 256, {1: (8, 4, 1), 2: (8, 3, 2), 4: (4, 3, 2), 8: (2, 4, 1), 16: None}),
        (16, 2, 512, {1: (8, 5, 1), 4: (8, 5, 1), 8: (4, 5, 1), 32: (2, 5, 1), 128: None}),
    ],
)
def test_plans_of_an_h200_are_those_that_were_measured(
    heads: int, kv_heads: int, size: int, plans: dict[int, tuple[int, int, int] | None]
) -> None:
    for tokens, want in plans.items():
        found = choose_plan(tokens, heads, kv_heads, size)
        assert found == (None if want is None else Plan(*want))


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs TRITON_INTERPRET=0 and a GPU")
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "dtype"),
    [(*shape, torch.bfloat16) for shape in SHAPES] + [(*SHAPES[2], torch.float16)],
)
@pytest.mark.parametrize("count", [2, 8])
def test_on_a_gpu(heads: int, kv_heads: int, size: int, dtype: torch.dtype, count: int) -> None:
    lengths = [*(1030, 1, 3000, 513, 64, 65, 1024)[: count - 1], 9]
    normed, shared = {64: (1, False), 256: (2, False), 512: (2, True)}.get(size, (0, False))
    case = Step(lengths, heads, kv_heads, size, dtype, "cuda", normed, shared)
    assert cuda.fits(*case.given(), case.where[0], case.more.get("norm"), shared)
    for options in ({}, {"window": 600, "softcap": 5.0}):
        found, after = case.run(**options)
        want, arena = case.expected(**options)
        assert near(found, want)
        assert not found[-1].any()
        new = (after != case.arena).any(-1)
        assert near(after[new], arena[new])
        assert torch.equal(after[~new], case.arena[~new])
        assert new.sum() == 2 * kv_heads * (count - 1)
        for _ in range(3):
            again, twice = case.run(**options)
            assert torch.equal(again, found)
            assert torch.equal(twice, after)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs TRITON_INTERPRET=0 and a GPU")
def test_a_graph_follows_lengths() -> None:
    case = Step([1030, 700, 9], 16, 16, 128, torch.bfloat16, "cuda")
    graph = torch.cuda.CUDAGraph()
    case.run()
    with torch.cuda.graph(graph):
        found = cuda.attend(*case.given(), *case.where, scale=0.1, **case.more)
    case.where[2].copy_(torch.tensor([40, 1029, 3]))
    last = (case.where[2] - 1).long()
    tables = case.where[0]
    slots = tables.gather(1, (last // 4)[:, None])[:, 0].long() * 4 + last % 4
    case.slots[:2] = slots[:2]
    want, arena = case.expected()
    graph.replay()
    assert near(found, want)
    assert near(case.arena, arena)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs TRITON_INTERPRET=0 and a GPU")
def test_the_door_takes_the_kernel_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "paged_attention", lambda *_, **__: pytest.fail("two launches"))
    case = Step([1030, 9], 16, 16, 128, torch.bfloat16, "cuda")
    want, arena = case.expected()
    found = joint_attention.attend(
        *case.given(), case.slots, *case.where, head_size=128, scale=0.1, **case.more
    )
    assert near(found, want)
    assert near(case.arena, arena)
