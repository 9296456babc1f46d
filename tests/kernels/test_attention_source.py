"""The source of the decode attention, run on a CPU as `test_cuda_source.py` does for the MoE."""

import ctypes
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pw_kernels import reference
from pw_kernels.attention_plans import (
    Arguments,
    Plan,
    choose_plan,
    constants_of,
    threads_of,
)
from support.cuda_source import CudaSource

SOURCE = CudaSource("attention.cu", "attention_on_cpu.h", [  # defined by the headers
    "exp2_fast", "load_int", "load_pair", "load_four", "copy_rows", "load_rows",
    "load_columns", "transposed",
])  # fmt: skip
DTYPE = torch.bfloat16
PLAN = Plan(warps=4, units=3, part=96)

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


class Written(ctypes.Structure):
    """`Written` of attention_on_cpu.h."""

    _fields_ = (("to", ctypes.c_void_p), ("source", ctypes.c_void_p), ("bytes", ctypes.c_uint64))


class Case:
    """Sequences in scattered pages; what nobody may read is NaN."""

    def __init__(
        self,
        lengths: list[int],
        queries: list[int],
        heads: int,
        kv_heads: int,
        size: int,
        plan: Plan = PLAN,
    ):
        self.plan = plan
        self.page_tokens, rows = 5, sum(queries) + 1  # one query of no sequence
        blocks = max(-(-length // self.page_tokens) for length in lengths)
        pages = len(lengths) * blocks + 2
        shape = (pages, 2, self.page_tokens, kv_heads, size)
        arena = torch.full(shape, torch.nan, dtype=DTYPE)
        self.tables = torch.randperm(pages)[: len(lengths) * blocks].int().view(-1, blocks)
        for b, length in enumerate(lengths):
            for t in range(length):
                page, slot = int(self.tables[b, t // self.page_tokens]), t % self.page_tokens
                arena[page, :, slot] = torch.randn(2, kv_heads, size).to(DTYPE)
        self.arena = arena
        self.starts = torch.tensor([0, *queries]).cumsum(0).int()
        self.lengths = torch.tensor(lengths).int()
        wide = torch.randn(rows, heads + 2, size).to(DTYPE)  # rows need not be dense
        self.wide, self.q = wide, wide[:, 1 : heads + 1]
        self.sinks = torch.randn(heads)

    def compile(self, folder: Path, **options: Any) -> Any:
        heads, kv_heads, size = self.q.shape[1], self.arena.shape[3], self.q.shape[2]
        defines = constants_of(self.plan, heads, kv_heads, size, self.page_tokens, DTYPE)
        defines |= {name.upper(): int(name in options) for name in ("window", "softcap", "sinks")}
        self.threads = threads_of(defines)
        return SOURCE.compile(folder, "attention(*(const Arguments*)all);", defines)

    def run(self, library: Any, blocks: int = 3, **options: Any) -> Tensor:
        tokens, heads, size = self.q.shape
        keys, values = self.arena[:, 0], self.arena[:, 1]
        parts = self.plan.parts_of(self.tables.shape[1] * self.page_tokens)
        out = torch.full((tokens, heads, size), torch.nan).to(DTYPE)
        partial = torch.full((tokens, heads, parts, size), torch.nan)
        extremes = torch.full((tokens, heads, parts, 2), torch.nan)
        arrived = torch.zeros(tokens * heads, dtype=torch.int32)
        where = (self.q, keys, values, self.tables, self.starts, self.lengths, self.sinks, out)
        arguments = Arguments(
            *(tensor.data_ptr() for tensor in (*where, partial, extremes, arrived)),
            *keys.stride()[:3], *values.stride()[:3], *self.q.stride()[:2],
            self.tables.stride(0), tokens, len(self.lengths), parts, options.get("window") or 0,
            0.1, options.get("softcap") or 0.0,
        )  # fmt: skip
        library.run(ctypes.byref(arguments), blocks, 1, self.threads)
        assert int(arrived.sum()) == 0
        return out

    def expected(self, **options: Any) -> Tensor:
        if "sinks" in options:
            options["sinks"] = self.sinks
        return reference.paged_attention(
            self.q, self.arena[:, 0], self.arena[:, 1], self.tables, self.starts, self.lengths,
            scale=0.1, **options,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(2, 2, 128), (8, 1, 64), (12, 1, 128), (8, 1, 256), (2, 1, 256)]
)
@pytest.mark.parametrize("options", [{}, {"window": 70}, {"softcap": 2.0, "sinks": True}])
def test_decode_attention(
    tmp_path: Path, heads: int, kv_heads: int, size: int, options: dict[str, Any]
) -> None:
    plan = Plan(8, 4, 112) if size == 64 else PLAN
    case = Case([251, 1, 30, 97], [1, 1, 0, 1], heads, kv_heads, size, plan)
    library = case.compile(tmp_path, **options)
    found, want = case.run(library, **options), case.expected(**options)
    assert (found.float() - want.float()).norm() <= 5e-3 * want.float().norm()
    assert not found[3].any()


@pytest.mark.parametrize(
    ("heads", "size", "kilobytes", "ring"),
    [(2, 128, 99, (4, 4)), (8, 128, 163, (8, 3)), (8, 256, 163, (4, 4)), (8, 256, 99, (4, 3))],
)
def test_plans_of_devices_with_less_room(
    tmp_path: Path, heads: int, size: int, kilobytes: int, ring: tuple[int, int]
) -> None:
    plan = choose_plan(5, heads, 1, size, kilobytes << 10)
    assert (plan.warps, plan.units) == ring
    case = Case([251, 1, 30, 97], [1, 1, 0, 1], heads, 1, size, replace(plan, part=96))
    found, want = case.run(case.compile(tmp_path, sinks=True)), case.expected(sinks=True)
    assert (found.float() - want.float()).norm() <= 5e-3 * want.float().norm()


@pytest.mark.parametrize(("lengths", "queries"), [([40, 0], [1, 1]), ([0, 33, 1], [2, 1, 40])])
@pytest.mark.parametrize("options", [{}, {"window": 20}])
def test_queries_before_the_first_key_get_zeros(
    tmp_path: Path, lengths: list[int], queries: list[int], options: dict[str, Any]
) -> None:
    case = Case(lengths, queries, 2, 1, 128)
    found = case.run(case.compile(tmp_path, **options), **options)
    token, seen = 0, []
    for length, new in zip(lengths, queries, strict=True):
        seen += range(token + max(0, new - length), token + new)
        token += new
    unseen = [row for row in range(len(found)) if row not in seen]
    assert not found[unseen].any()
    want = case.expected(**options)[seen]
    assert (found[seen].float() - want.float()).norm() <= 5e-3 * want.float().norm()


def test_who_takes_a_part_does_not_matter(tmp_path: Path) -> None:
    case = Case([251, 100], [1, 1], 2, 2, 64)
    library = case.compile(tmp_path)
    results = [case.run(library, blocks) for blocks in (1, 3, 10)]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_with_equal_plans_a_token_s_result_does_not_depend_on_the_batch(tmp_path: Path) -> None:
    case = Case([60, 251], [1, 1], 2, 1, 128)
    library = case.compile(tmp_path)
    both = case.run(library)
    case.q, case.tables, case.lengths = case.q[1:2], case.tables[1:], case.lengths[1:]
    case.starts = case.starts[:2]
    assert torch.equal(case.run(library)[0], both[1])


@pytest.mark.parametrize(("lengths", "queries"), [
    ([251], [1]), ([17], [1]), ([16], [1]), ([40], [3]), ([18], [3]), ([7, 33], [2, 17]),
])  # fmt: skip
@pytest.mark.parametrize("window", [None, 20])
def test_what_the_launch_before_writes_is_read_behind_the_wait(
    tmp_path: Path, lengths: list[int], queries: list[int], window: int | None
) -> None:
    options = {} if window is None else {"window": window}
    case = Case(lengths, queries, 2, 1, 128)
    library, want = case.compile(tmp_path, **options), case.expected(**options)
    written = (Written * 2).in_dll(library, "written")
    real = [tensor.clone() for tensor in (case.arena, case.wide)]
    for b, (length, new) in enumerate(zip(lengths, queries, strict=True)):
        for t in range(length - new, length):
            page = int(case.tables[b, t // case.page_tokens])
            case.arena[page, :, t % case.page_tokens] = torch.nan
    case.wide.fill_(torch.nan)
    for place, tensor, now in zip(written, (case.arena, case.wide), real, strict=True):
        place.to, place.source, place.bytes = tensor.data_ptr(), now.data_ptr(), now.nbytes
    ctypes.c_int.in_dll(library, "waiting").value = case.threads
    found = case.run(library, blocks=1, **options)
    assert (found.float() - want.float()).norm() <= 5e-3 * want.float().norm()


def test_parts_are_of_equal_length() -> None:
    for least, shortest in ((1, 128), (4, 128), (33, 64)):
        plan = Plan(8, 4, part=1024, least=least, shortest=shortest)
        for keys in range(1, 9000, 7):
            parts = plan.parts_of(keys)
            assert parts == 1 or keys / parts >= min(shortest, 1024) / 1.5
            assert keys / parts < 1.5 * 1024
            assert parts >= min(least, keys // (2 * shortest))
    assert [Plan(8, 4, least=8).parts_of(keys) for keys in (140, 1024, 1040, 9000)] == [1, 8, 8, 9]
    assert [Plan(8, 4).parts_of(keys) for keys in (1024, 1100, 1535, 1536)] == [1, 1, 1, 2]
