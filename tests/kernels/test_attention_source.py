"""The source of the decode attention, run on a CPU as `test_cuda_source.py` does for the MoE."""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pw_kernels
from pw_kernels import reference
from pw_kernels.attention_plans import Arguments, constants_of, programs_of

SUPPORT = Path(__file__).parents[1] / "support"
INSTRUCTIONS = [  # defined by the headers
    "to_half", "exp2_fast", "load_written", "load_int", "load_sum", "wait_for_earlier",
    "let_next_begin",
]  # fmt: skip
DTYPE = torch.bfloat16
PART = 48

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def as_cpp() -> str:
    """attention.cu without types and single instructions."""
    source = Path(pw_kernels.__file__).with_name("attention.cu").read_text()
    source = re.sub(r"typedef unsigned .*;\n", "", source)
    for name in INSTRUCTIONS:
        source, count = re.subn(rf"(?m)^DI \w+ {name}\(.*?(\}}|^\}})$\n", "", source, flags=re.S)
        assert count, name
    source = source.replace("extern __shared__ __align__(128)", 'extern "C"')
    entry = 'extern "C" void kernel(const void* all) { attention(*(const Arguments*)all); }'
    return f'#include "attention_on_cpu.h"\n{source}\n{entry}\n'


def library(folder: Path, defines: dict[str, int]) -> Any:
    """With `run(arguments, columns, rows, threads)`."""
    (folder / "kernel.cpp").write_text(as_cpp())
    files = [folder / "kernel.cpp", SUPPORT / "cuda_on_cpu.cpp"]
    options = ["-O1", "-w", "-std=c++17", "-fPIC", "-shared", "-fno-strict-aliasing"]
    macros = [f"-D{key}={value}" for key, value in defines.items()]
    command = ["g++", *options, *macros, f"-I{SUPPORT}", *files, "-o", folder / "kernel.so"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    return ctypes.CDLL(str(folder / "kernel.so"))


class Case:
    """Sequences in scattered pages; what nobody may read is NaN."""

    def __init__(
        self, lengths: list[int], queries: list[int], heads: int, kv_heads: int, size: int
    ):
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
        self.q = wide[:, 1 : heads + 1]
        self.sinks = torch.randn(heads)

    def run(self, folder: Path, **options: Any) -> Tensor:
        tokens, heads, size = self.q.shape
        keys, values = self.arena[:, 0], self.arena[:, 1]
        kv_heads = keys.shape[2]
        parts = -(-self.tables.shape[1] * self.page_tokens // PART)
        programs = options.pop("programs", programs_of(tokens, kv_heads, parts * 512)[1])
        out = torch.full((tokens, heads, size), torch.nan).to(DTYPE)
        partial = torch.full((tokens, heads, parts, size), torch.nan)
        extremes = torch.full((tokens, heads, parts, 2), torch.nan)
        arrived = torch.zeros(tokens * kv_heads, dtype=torch.int32)
        where = (self.q, keys, values, self.tables, self.starts, self.lengths, self.sinks, out)
        arguments = Arguments(
            *(tensor.data_ptr() for tensor in (*where, partial, extremes, arrived)),
            *keys.stride()[:3], *values.stride()[:3], *self.q.stride()[:2],
            self.tables.stride(0), len(self.lengths), parts, programs,
            options.get("window") or 0, 0.1, options.get("softcap") or 0.0,
        )  # fmt: skip
        defines = constants_of(heads, kv_heads, size, self.page_tokens, DTYPE) | {"PART": PART}
        defines |= {name.upper(): int(name in options) for name in ("window", "softcap", "sinks")}
        columns = tokens * programs
        kernel = library(folder, defines)
        kernel.run(ctypes.byref(arguments), columns, kv_heads, 32 * defines["WARPS"])
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
    ("heads", "kv_heads", "size"), [(2, 2, 128), (4, 2, 64), (3, 1, 128), (2, 2, 512), (2, 1, 256)]
)
@pytest.mark.parametrize("options", [{}, {"window": 70}, {"softcap": 2.0, "sinks": True}])
def test_decode_attention(
    tmp_path: Path, heads: int, kv_heads: int, size: int, options: dict[str, Any]
) -> None:
    case = Case([151, 1, 30, 47], [1, 1, 0, 1], heads, kv_heads, size)
    found, want = case.run(tmp_path, **options), case.expected(**options)
    assert (found.float() - want.float()).norm() <= 5e-3 * want.float().norm()
    assert not found[3].any()


def test_who_takes_a_part_does_not_matter(tmp_path: Path) -> None:
    case = Case([151, 100], [1, 1], 2, 2, 64)
    results = []
    for programs in (1, 3, 4):
        folder = tmp_path / str(programs)
        folder.mkdir()
        results.append(case.run(folder, programs=programs))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_token_s_result_does_not_depend_on_the_batch(tmp_path: Path) -> None:
    case = Case([60, 151], [1, 1], 2, 1, 128)
    both = case.run(tmp_path)
    case.q, case.tables, case.lengths = case.q[1:2], case.tables[1:], case.lengths[1:]
    case.starts = case.starts[:2]
    assert torch.equal(case.run(tmp_path)[0], both[1])
