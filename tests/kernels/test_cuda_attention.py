"""The CUDA attention of decode steps: code for three generations, and results on a GPU."""

from __future__ import annotations

import os
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from pw_kernels import reference
from pw_kernels.attention_plans import (
    MOST_GROUP,
    MOST_TOKENS,
    SIZES,
    Plan,
    choose_plan,
    constants_of,
    most_workspace_bytes,
    shared_bytes,
    takes,
    workspace_bytes,
)

nvrtc = pytest.importorskip("pw_kernels.nvrtc", reason="needs cuda-bindings")
cuda_attention = pytest.importorskip("pw_kernels.cuda_attention")

INTERPRETED = os.environ["TRITON_INTERPRET"] == "1"
SHAPES = [
    (16, 16, 128), (32, 8, 128), (32, 4, 128), (64, 4, 128), (16, 8, 256), (12, 4, 64)
]  # fmt: skip


ROOMS = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10}  # others: 227 KB


@pytest.mark.parametrize(
    ("capability", "shapes"),
    [(80, [(8, 1, 256)]), (89, [(16, 16, 128)]), (90, SHAPES[4:]), (100, SHAPES[5:])],
)
def test_compiles_ahead_of_time(capability: int, shapes: list[tuple[int, int, int]]) -> None:
    for heads, kv_heads, size in shapes:
        plan = choose_plan(32, heads, kv_heads, size, ROOMS.get(capability, 227 << 10))
        constants = constants_of(plan, heads, kv_heads, size, 16, torch.bfloat16)
        constants |= {"WINDOW": int(size > 128), "SOFTCAP": int(size == 64), "SINKS": 1}
        try:
            code = nvrtc.compile_source("attention.cu", constants, capability)
        except RuntimeError as error:  # cuda-bindings without the library that it binds
            pytest.skip(f"NVRTC is not installed: {error}")
        assert len(code) > 1000


@pytest.mark.parametrize("room", [*ROOMS.values(), 227 << 10])
def test_every_shape_has_a_plan_that_fits_for_all_batches(room: int) -> None:
    for group, size in product(range(1, MOST_GROUP + 1), SIZES):
        heads = 4 * group
        assert takes(heads, 4, size)
        plans = [choose_plan(tokens, heads, 4, size, room) for tokens in (1, 126, 127, 512)]
        assert len({(plan.warps, plan.units) for plan in plans}) == 1
        for plan in plans:
            constants = constants_of(plan, heads, 4, size, 16, torch.bfloat16)
            assert shared_bytes(constants, MOST_TOKENS) <= room
    assert not takes(32, 1, 128)
    assert not takes(8, 8, 80)
    assert not takes(16, 2, 512)


def test_plans_of_an_h200_are_those_that_were_measured() -> None:
    for group, kv_heads, size in product(range(1, 2 * MOST_GROUP + 1), (1, 2, 4, 8, 16), SIZES):
        if not takes(group * kv_heads, kv_heads, size):
            continue
        for tokens in (1, 2, 4, 5, 8, 16, 17, 32, 64, 127, 512):
            rows = tokens * kv_heads * (1 if group <= MOST_GROUP else 2)
            plan = choose_plan(tokens, group * kv_heads, kv_heads, size, 227 << 10)
            assert plan == Plan(warps=8, units=4, part=1024, least=max(1, 132 // rows))
            assert plan == choose_plan(tokens, group * kv_heads, kv_heads, size)


@pytest.mark.parametrize("strided", [None, "tables", "starts", "lengths"])
def test_a_launch_does_not_overlap_with_copies_of_what_it_reads_before_its_wait(
    monkeypatch: pytest.MonkeyPatch, strided: str | None
) -> None:
    overlaps = []

    class Launched:
        def launch(self, *_: Any, overlap: bool) -> None:
            overlaps.append(overlap)

    monkeypatch.setattr(nvrtc, "kernel", lambda *_: Launched())
    monkeypatch.setattr(nvrtc, "shared_bytes", lambda _: 227 << 10)
    monkeypatch.setattr(nvrtc, "device_attribute", lambda *_: 132)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    read = {
        "tables": torch.zeros(2, 3, 8, dtype=torch.int32)[:, 1],  # rows need not be dense
        "starts": torch.tensor([0, 1, 2], dtype=torch.int32),
        "lengths": torch.tensor([5, 9], dtype=torch.int32),
    }
    if strided is not None:
        read[strided] = torch.stack([read[strided]] * 2, -1)[..., 0]
    pages = torch.zeros(4, 2, 16, 2, 64, dtype=torch.bfloat16)
    cuda_attention.paged_attention(
        torch.zeros(2, 4, 64, dtype=torch.bfloat16), pages[:, 0], pages[:, 1], *read.values(),
        scale=0.1, counters=torch.zeros(8, dtype=torch.int32),
    )  # fmt: skip
    assert overlaps == [strided is None]


def test_workspace_grows_with_the_batch() -> None:
    for heads, kv_heads, size in SHAPES:
        most = most_workspace_bytes(64, heads, kv_heads, size, 5000)
        for tokens in range(1, 65):
            assert workspace_bytes(tokens, heads, kv_heads, size, 5000) <= most


@pytest.mark.parametrize(
    ("kilobytes", "ring"), [(227, (8, 4)), (163, (8, 4)), (99, (4, 4)), (48, None)]
)
def test_a_block_has_room_on_the_device(
    kilobytes: int, ring: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvrtc, "shared_bytes", lambda _: kilobytes << 10)
    for tokens in (1, 9, 127, 512):
        q = torch.empty(tokens, 16, 128)
        assert cuda_attention._has_room(q, tokens, 16) == (ring is not None)
        plan = choose_plan(tokens, 16, 16, 128, kilobytes << 10)
        assert ring is None or (plan.warps, plan.units) == ring
    for size in (128, 256):  # of eight query heads, too, in the middle of the range as at its ends
        found = {
            cuda_attention._has_room(torch.empty(tokens, 32, size), tokens, 4)
            for tokens in (1, 126, 127, 512)
        }
        assert found == {ring is not None}


def test_a_block_has_room_for_the_lengths_of_all_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nvrtc, "shared_bytes", lambda _: 227 << 10)
    q = torch.empty(9, 16, 128)
    assert cuda_attention._has_room(q, 1 << 10, 16)
    assert not cuda_attention._has_room(q, 1 << 15, 16)


class Call:
    """A padded decode step over scattered pages."""

    def __init__(
        self, lengths: list[int], heads: int, kv_heads: int, size: int, dtype: torch.dtype
    ) -> None:
        page_tokens, count = 4, len(lengths)
        blocks = -(-max(lengths) // page_tokens)
        pages = count * blocks + 3
        generator = torch.Generator("cuda").manual_seed(size)
        arena = torch.randn(
            pages, 2, page_tokens, kv_heads, size, device="cuda", generator=generator
        ).to(dtype)
        tables = torch.randperm(pages, device="cuda", generator=generator)[: count * blocks]
        starts = torch.arange(count + 1, device="cuda").int()
        starts[-1] = count - 1  # the last sequence is padding
        q = torch.randn(count, heads, size, device="cuda", generator=generator).to(dtype)
        lens = torch.tensor(lengths, device="cuda").int()
        self.args = (q, arena[:, 0], arena[:, 1], tables.int().view(count, blocks), starts, lens)

    def run(self, module: object, **options: object) -> Tensor:
        return module.paged_attention(*self.args, scale=0.1, **options)  # type: ignore[attr-defined, no-any-return]


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs TRITON_INTERPRET=0 and a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), SHAPES)
def test_on_a_gpu(heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> None:
    call = Call([150, 1, 3000, 513, 64, 65, 1024, 9], heads, kv_heads, size, dtype)
    assert cuda_attention.fits(*call.args[:4])
    assert choose_plan(8, heads, kv_heads, size).parts_of(3000) > 1
    sinks = torch.randn(heads, device="cuda")
    for options in ({}, {"window": 600}, {"softcap": 5.0, "sinks": sinks}):
        found, want = call.run(cuda_attention, **options), call.run(reference, **options)
        assert (found.float() - want.float()).norm() <= 1e-2 * want.float().norm()
        assert not found[-1].any()
        for _ in range(3):
            assert torch.equal(call.run(cuda_attention, **options), found)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = call.run(cuda_attention)
    q, keys, values, tables, starts, lengths = call.args
    lengths.copy_(torch.tensor([3, 1, 2000, 512, 70, 2, 1030, 9]))
    graph.replay()
    want = call.run(reference)
    assert (again.float() - want.float()).norm() <= 1e-2 * want.float().norm()
    one = (q[2:3], keys, values, tables[2:3], starts[:2], lengths[2:3])
    plan = choose_plan(8, heads, kv_heads, size, nvrtc.shared_bytes(q.device.index))
    alone = cuda_attention.paged_attention(*one, scale=0.1, plan=plan)
    assert torch.equal(alone[0], again[2])


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs TRITON_INTERPRET=0 and a GPU")
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(16, 16, 128), (8, 1, 256), (12, 4, 64)])
@pytest.mark.parametrize(("warps", "units"), [(8, 3), (4, 4), (4, 3)])
def test_plans_of_devices_with_less_shared_memory(
    warps: int, units: int, heads: int, kv_heads: int, size: int
) -> None:
    call = Call([150, 1, 3000, 513, 64, 65, 1024, 9], heads, kv_heads, size, torch.bfloat16)
    sinks = torch.randn(heads, device="cuda")
    for part in (256, 1024):
        plan = Plan(warps, units, part)
        for options in ({}, {"window": 600, "softcap": 5.0, "sinks": sinks}):
            found = call.run(cuda_attention, **options, plan=plan)
            want = call.run(reference, **options)
            assert (found.float() - want.float()).norm() <= 1e-2 * want.float().norm()
            assert not found[-1].any()
            for _ in range(3):
                assert torch.equal(call.run(cuda_attention, **options, plan=plan), found)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs TRITON_INTERPRET=0 and a GPU")
def test_callers_with_counters_of_their_own_do_not_meet() -> None:
    call = Call([3000, 2500, 700, 1030] * 4, 16, 16, 128, torch.bfloat16)
    want = call.run(cuda_attention)
    callers = [(torch.cuda.Stream(), cuda_attention.make_counters(want.device)) for _ in range(3)]
    torch.cuda.synchronize()
    found = []
    for _ in range(10):
        for stream, counters in callers:
            with torch.cuda.stream(stream):
                found.append(call.run(cuda_attention, counters=counters))
    torch.cuda.synchronize()
    assert all(torch.equal(one, want) for one in found)
    assert not any(counters.any() for _, counters in callers)
