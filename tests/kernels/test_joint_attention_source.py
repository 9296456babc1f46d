"""The source of joint decode attention, run on a CPU as `test_cuda_source.py` does for the MoE."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pw_kernels import reference, step
from pw_kernels.joint_attention_plans import Arguments, Plan, constants_of, threads_of
from support.cuda_source import LOADS, CudaSource

SOURCE = CudaSource("joint_attention.cu", "joint_attention_on_cpu.h", [  # defined by the headers
    *LOADS, "exp2_fast", "load_int", "copy_rows", "load_rows", "load_columns", "transposed",
    "rank_in_cluster", "push", "cluster_arrive", "cluster_wait",
])  # fmt: skip
DTYPE = torch.bfloat16
PAGE_TOKENS = 5

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


class Written(ctypes.Structure):
    """`Written` of attention_on_cpu.h."""

    _fields_ = (("to", ctypes.c_void_p), ("source", ctypes.c_void_p), ("bytes", ctypes.c_uint64))


class Case:
    """A step of sequences in scattered pages; the last has no query. What nobody may read is NaN.

    Args:
        lengths: With the new key.
        heads: Query heads.
        kv_heads: Key heads.
        size: Of a head.
        normed: Kinds of heads that are normed: queries and keys, then values.
        shared: Values are the keys.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        heads: int,
        kv_heads: int,
        size: int,
        normed: int = 0,
        shared: bool = False,
    ) -> None:
        self.heads, self.kv_heads, self.size, self.shared = heads, kv_heads, size, shared
        count, live = len(lengths), len(lengths) - 1
        blocks = max(-(-length // PAGE_TOKENS) for length in lengths)
        pages = count * blocks + 2
        self.arena = torch.full((pages, 2, PAGE_TOKENS, kv_heads, size), torch.nan, dtype=DTYPE)
        self.tables = torch.randperm(pages)[: count * blocks].int().view(count, blocks)
        self.slots = torch.full((count,), -1)
        for b, length in enumerate(lengths):
            for t in range(length):
                page, place = int(self.tables[b, t // PAGE_TOKENS]), t % PAGE_TOKENS
                if t < length - 1:
                    self.arena[page, :, place] = torch.randn(2, kv_heads, size).to(DTYPE)
                elif b < live:
                    self.slots[b] = page * PAGE_TOKENS + place
        self.starts = torch.arange(count + 1).clamp(max=live).int()
        self.lengths = torch.tensor(lengths).int()
        outputs = (heads + (1 if shared else 2) * kv_heads) * size
        self.wide = torch.randn(count, outputs + 8).to(DTYPE)  # rows need not be dense
        self.qkv = self.wide[:, :outputs]
        self.cos, self.sin = torch.randn(2, count, size).to(DTYPE)
        rows = [0, heads + kv_heads, heads + 2 * kv_heads][normed]
        self.norm = torch.rand(rows, size).add(0.5).to(DTYPE) if rows else None

    def compile(self, folder: Path, plan: Plan, **options: Any) -> Any:
        defines = constants_of(plan, self.heads, self.kv_heads, self.size, PAGE_TOKENS, DTYPE)
        defines |= {name.upper(): int(name in options) for name in ("window", "softcap")}
        defines |= {"NORMED": 0 if self.norm is None else len(self.norm)}
        defines |= {"SHARED": int(self.shared)}
        self.plan, self.threads = plan, threads_of(plan)
        return SOURCE.compile(folder, "attend(*(const Arguments*)all);", defines)

    def run(self, library: Any, **options: Any) -> Tensor:
        keys, values = self.arena[:, 0], self.arena[:, 1]
        count = len(self.lengths)
        out = torch.full((count, self.heads, self.size), torch.nan).to(DTYPE)
        where = (self.qkv, self.cos, self.sin, self.norm, keys, values, self.tables, self.starts,
                 self.lengths, out)  # fmt: skip
        arguments = Arguments(
            *(0 if tensor is None else tensor.data_ptr() for tensor in where),
            *keys.stride()[:3], *values.stride()[:3], self.qkv.stride(0), self.cos.stride(0),
            self.tables.stride(0), self.tables.shape[1], count, options.get("window") or 0, 0.1,
            options.get("softcap") or 0.0, 1e-5,
        )  # fmt: skip
        blocks = count * self.kv_heads * self.plan.cluster
        library.run(ctypes.byref(arguments), blocks, 1, self.threads)
        return out

    def expected(self, **options: Any) -> tuple[Tensor, Tensor]:
        """What is to come out, and the arena afterwards."""
        arena = self.arena.clone()
        q = step.rotate_store(
            self.qkv, self.cos, self.sin, arena[:, 0], arena[:, 1], self.slots,
            head_size=self.size, norm=self.norm, epsilon=1e-5, shared_values=self.shared,
            backend="torch",
        )  # fmt: skip
        out = reference.paged_attention(
            q, arena[:, 0], arena[:, 1], self.tables, self.starts, self.lengths, scale=0.1,
            **options,
        )  # fmt: skip
        return out, arena


def check(case: Case, library: Any, **options: Any) -> Tensor:
    """Run, and compare with the parts by themselves."""
    want, arena = case.expected(**options)
    found = case.run(library, **options)
    assert (found.float() - want.float()).norm() <= 5e-3 * want.float().norm()
    assert not found[-1].any()
    assert torch.equal(case.arena.isnan(), arena.isnan())  # nothing else is stored
    off = (case.arena.nan_to_num().float() - arena.nan_to_num().float()).abs()
    assert (off <= 2**-7 * arena.nan_to_num().float().abs()).all()  # one rounding
    return found


@pytest.mark.parametrize("cluster", [1, 2, 4])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "normed", "shared"),
    [
        (2, 2, 128, 0, False),
        (8, 1, 64, 1, False),
        (4, 2, 256, 2, False),
        (8, 1, 128, 2, True),
        (8, 1, 512, 2, True),
    ],
)
@pytest.mark.parametrize("options", [{}, {"window": 70}, {"softcap": 2.0}])
def test_joint_attention(
    tmp_path: Path,
    cluster: int,
    heads: int,
    kv_heads: int,
    size: int,
    normed: int,
    shared: bool,
    options: dict[str, Any],
) -> None:
    case = Case([251, 1, 17, 97, 33, 40], heads, kv_heads, size, normed, shared)
    plan = Plan(cluster, {256: 4, 512: 5}.get(size, 3), 1, warps=4)
    check(case, case.compile(tmp_path, plan, **options), **options)


def test_parts_of_long_contexts_meet_in_a_cluster_of_eight(tmp_path: Path) -> None:
    case = Case([1040, 1025, 7], 2, 1, 128)
    check(case, case.compile(tmp_path, Plan(8, 3, 2)))


def test_what_the_launch_before_writes_is_read_behind_the_wait(tmp_path: Path) -> None:
    case = Case([163, 9], 2, 1, 128, normed=1)
    library = case.compile(tmp_path, Plan(1, 3, 2, warps=4))
    want, _ = case.expected()
    made = (case.wide, case.cos, case.sin)
    real = [tensor.clone() for tensor in made]
    written = (Written * len(made)).in_dll(library, "written")
    for place, tensor, now in zip(written, made, real, strict=True):
        tensor.fill_(torch.nan)
        place.to, place.source, place.bytes = tensor.data_ptr(), now.data_ptr(), now.nbytes
    ctypes.c_int.in_dll(library, "waiting").value = case.threads
    found = case.run(library)
    assert (found[:1].float() - want[:1].float()).norm() <= 5e-3 * want.float().norm()
