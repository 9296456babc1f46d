"""The source of the CUDA MoE, run on a CPU: the same decoders, page look-ups and sums as on a GPU.

The .cu file is compiled as C++ with `support/cuda_on_cpu.h` in place of what a GPU has. It shows
what a kernel computes, not what it races with: for that there is compute-sanitizer.
"""

import ctypes
import shutil
from pathlib import Path

import pytest
import torch
from torch.nn.functional import silu

from pw_kernels import reference, testing
from pw_kernels.bitplane import TILE_BYTES
from pw_kernels.pages import WeightPages
from support.cuda_source import CudaSource

PAGE_BYTES = 4096
WIDTHS = [2, 3, 4, 5, 6, 7, 8]
SLOTS = 8  # of a group
_HIDDEN_PAIRS = 3  # pairs of row tiles of gate_up
SOURCE = CudaSource("moe.cu", "cuda_on_cpu.h", [  # defined by cuda_on_cpu.h
    "upper", "line", "mad_wide", "load_stream", "load_page", "load_written", "load_acquire",
    "add_release", "this_thread", "rest", "copy_async", "copy_async8", "entry", "pair_entry",
])  # fmt: skip
ROUTING = CudaSource("routing.cu", "cuda_on_cpu.h", [])

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


class Arguments(ctypes.Structure):
    """`Arguments` of moe.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "x", "arena", "plane_pages", "lut_pages", "bias", "weights", "work", "slots", "out"
        )),
        ("slot_count", ctypes.c_int),
        ("groups", ctypes.c_int),
        ("tile_bytes", ctypes.c_uint),
        ("done", ctypes.c_void_p),
        ("queue", ctypes.c_void_p),
        ("hidden_pairs", ctypes.c_uint),
    )  # fmt: skip


def blocks(rows: int, cols: int) -> tuple[torch.Tensor, WeightPages, dict[str, int]]:
    """An arena with a block of each width, and the constants that describe them."""
    pages = 60 * len(WIDTHS) + 3 * rows * cols * len(WIDTHS) // PAGE_BYTES
    arena = testing.ScatteredArena(pages, PAGE_BYTES)
    placed = testing.random_blocks(arena, rows, cols, WIDTHS)
    constants = {
        "FLOAT16": 0, "KIND": 0, "BIAS": 0, "CLASS": 0, "LOW": 2, "HIGH": 8, "NT": 1, "WK": 4,
        "ITEMS": 1, "BLOCKS": 1, "DIRECT": 0, "HALVED": 0,
        "EXPAND": 0, "FIRST": 1,
        "ROWS": rows, "COLS": cols, "ROW_TILES": -(-rows // 32),
        "COL_TILES": -(-cols // 128), "PLANES": placed.plane_pages.shape[1],
        "PP": placed.plane_pages.shape[2], "LP": placed.lut_pages.shape[1],
        "PAGE_SHIFT": PAGE_BYTES.bit_length() - 1,
    }  # fmt: skip
    return arena.data, placed, constants


def pointers(*tensors: torch.Tensor) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


class Case:
    """Blocks of every width, tokens of random experts, and what the kernel should give."""

    def __init__(self, gated: bool, tokens: int, top_k: int, cols: int | None = None) -> None:
        rows, most = (192, 264) if gated else (160, 392)
        self.rows, self.cols = rows, cols or most
        self.gated, self.top_k, self.count = gated, top_k, tokens * top_k
        self.arena, self.placed, self.constants = blocks(self.rows, self.cols)
        self.constants |= {"TOP_K": top_k, "GATED": int(gated)}
        choices = [torch.randperm(len(WIDTHS))[:top_k] for _ in range(tokens)]
        self.ids = torch.stack(choices).flatten()
        self.x = torch.randn(tokens if gated else self.count, self.cols).bfloat16()
        self.weights = torch.rand(self.count)
        self.out = torch.full((self.count, self.rows // 2 if gated else self.rows), torch.nan)
        self.out = self.out.bfloat16() if gated else self.out
        self.progress = torch.zeros(100, dtype=torch.int32)  # groups of gate_up done; the queue
        if not gated:
            self.progress[:-1] = _HIDDEN_PAIRS

    def arguments(self, work: torch.Tensor, slots: torch.Tensor) -> Arguments:
        where = pointers(self.x, self.arena, self.placed.plane_pages, self.placed.lut_pages)
        rest = pointers(self.weights, work, slots, self.out)
        done = self.progress.data_ptr()
        return Arguments(
            *where, 0, *rest, self.count, len(slots), TILE_BYTES, done, done + 4 * 99, _HIDDEN_PAIRS
        )

    def without_lists(self, live: torch.Tensor, counted: torch.Tensor) -> str:
        """The call of a kernel that gets the router's choices."""
        tables = (self.ids, self.placed.bits, self.placed.lut_offset, live, counted)
        kinds = ("const long long", *["const int"] * 3, "float")
        given = [f"({k}*){t.data_ptr()}ull" for k, t in zip(kinds, tables, strict=True)]
        return f"experts(*(const Arguments*)all, Direct{{{', '.join(given)}, {len(WIDTHS)}}});"

    def check(self) -> None:
        want = torch.empty(self.count, self.rows)
        for slot, expert in enumerate(self.ids.tolist()):
            matrix = reference.decode_block(self.arena, self.placed, expert, torch.bfloat16)
            want[slot] = matrix @ self.x[slot // self.top_k if self.gated else slot].float()
        if self.gated:
            half = self.rows // 2
            want = (silu(want[:, :half]) * want[:, half:]).bfloat16().float()
        else:
            want *= self.weights[:, None]
        error = (self.out.float() - want).norm() / want.norm()
        assert error <= (1e-3 if self.gated else 1e-6)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    "constants",
    [
        {},
        {"NT": 2, "WK": 2, "HIGH": 4},
        {"WK": 2, "HIGH": 6},
        {"WK": 2, "HIGH": 2, "COLS": 384},
        {"ITEMS": 2, "LOW": 5},
        {"ITEMS": 2, "LOW": 5, "QUEUED": 200 << 10},
    ],
)
def test_every_width_of_the_decode_kernel(
    tmp_path: Path, gated: bool, constants: dict[str, int]
) -> None:
    case = Case(gated, tokens=12, top_k=3, cols=constants.get("COLS"))
    defines = case.constants | constants
    groups, work, size = [], [], SLOTS * defines["NT"]
    low = defines["LOW"]
    case.ids = case.ids % (defines["HIGH"] + 1 - low) + low - 2  # the widths that the kernel takes
    for expert, width in enumerate(WIDTHS):
        mine = (case.ids == expert).nonzero().flatten()
        for part in mine.split(size) if len(mine) else ():
            places = torch.full((size,), case.count, dtype=torch.int32)
            places[: len(part)] = part
            work.append([len(groups), expert, width, int(case.placed.lut_offset[expert])])
            groups.append(places)
    work.sort(key=lambda entry: -entry[2])
    work.append([0, -1, 0, 0])  # a group that is not needed
    slots, listed = torch.stack([*groups, groups[0]]), torch.tensor(work, dtype=torch.int32)
    library = SOURCE.compile(tmp_path, "experts(*(const Arguments*)all);", defines)
    columns = -(-defines["ROW_TILES"] // (2 * defines["ITEMS"]))
    arguments = case.arguments(listed, slots)
    grid = (4, 1) if "QUEUED" in defines else (columns, len(slots))
    library.run(ctypes.byref(arguments), *grid, 64 * defines["WK"])
    case.check()
    if gated:
        assert case.progress[: len(groups)].tolist() == [_HIDDEN_PAIRS] * len(groups)


class Routing(ctypes.Structure):
    """`Routing` of routing.cu."""

    _fields_ = (
        ("ids", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        *((name, ctypes.c_void_p * 2) for name in ("bits", "offsets", "work")),
        *((name, ctypes.c_void_p) for name in (
            "slots", "ranks", "counts", "statistics", "live", "progress"
        )),
        *((name, ctypes.c_int) for name in (
            "slot_count", "groups", "threshold", "progress_count"
        )),
        *((name, ctypes.c_int * 2) for name in ("least", "most")),
    )  # fmt: skip


@pytest.mark.parametrize("threshold", [8, 4, 3])
def test_groups_are_listed_by_class_the_widest_first(tmp_path: Path, threshold: int) -> None:
    experts, top_k, tokens, live = 70, 4, 33, 31
    count = tokens * top_k
    groups = count // SLOTS + experts
    ids = torch.rand(tokens, experts).argsort(1)[:, :top_k] ** 2 // experts  # some get many
    ids[3, 1] = experts  # no expert
    widths = torch.randint(2, 9, (2, experts), dtype=torch.int32)
    offsets = torch.arange(2 * experts, dtype=torch.int32).view(2, experts)
    weights = torch.rand(tokens, top_k)
    work = torch.full((2, 2, groups, 4), 77, dtype=torch.int32)
    slots = torch.full((groups, SLOTS), 77, dtype=torch.int32)
    ranks, counts = torch.zeros(count, dtype=torch.int32), torch.zeros(experts, dtype=torch.int32)
    statistics, progress = torch.zeros(2, experts), torch.ones(groups, dtype=torch.int32)
    valid = torch.tensor([live], dtype=torch.int32)
    pair = ctypes.c_void_p * 2
    arguments = Routing(
        ids.data_ptr(), weights.data_ptr(), pair(*pointers(*widths)), pair(*pointers(*offsets)),
        pair(*pointers(*work)),
        *pointers(slots, ranks, counts, statistics, valid, progress),
        count, groups, threshold, groups, (ctypes.c_int * 2)(2, 2), (ctypes.c_int * 2)(8, 8),
    )  # fmt: skip
    defines = {"EXPERTS": experts, "TOKENS": SLOTS, "TOP_K": top_k, "THREADS": 128, "FLOAT16": 0}
    ROUTING.compile(tmp_path, "route(*(const Routing*)all);", defines).run(
        ctypes.byref(arguments), 1, 1, 128
    )
    assert not progress.any()
    real = ids[:live].flatten()
    assert torch.equal(counts, torch.bincount(real, minlength=experts + 1)[:experts].int())
    for module in range(2):
        found = []
        for high, listed in enumerate(work[module].tolist()):
            used = [entry for entry in listed if entry[1] >= 0]
            assert listed[len(used) :] == [[0, -1, 0, 0]] * (groups - len(used))
            assert all((entry[2] > threshold) == high for entry in used)
            assert [e[2] for e in used] == sorted((e[2] for e in used), reverse=True)
            found += used
        for group, expert, width, offset in found:
            assert width == widths[module, expert]
            assert offset == offsets[module, expert]
            mine = [slot for slot in slots[group].tolist() if slot < count]
            assert mine
            assert [int(real[slot]) for slot in mine] == [expert] * len(mine)
        listed_slots = slots[[entry[0] for entry in found]].flatten().tolist()
        assert sorted(s for s in listed_slots if s < count) == [
            slot for slot, expert in enumerate(real.tolist()) if expert < experts
        ]


def test_results_of_a_token_are_added_up(tmp_path: Path) -> None:
    experts, top_k, tokens, live, width = 5, 3, 6, 4, 1032
    ids = torch.rand(tokens, experts + 1).argsort(1)[:, :top_k].contiguous()  # 5 is no expert
    results, valid = torch.randn(tokens, top_k, width), torch.tensor([live], dtype=torch.int32)
    out = torch.full((tokens, width), torch.nan).bfloat16()
    defines = {"EXPERTS": experts, "TOKENS": 8, "TOP_K": top_k, "THREADS": 128, "FLOAT16": 0}
    kinds = (("const float4", results), ("const long long", ids), ("ushort4", out))
    given = ", ".join(f"({kind}*){tensor.data_ptr()}ull" for kind, tensor in kinds)
    call = f"combine({given}, {width}, (const int*){valid.data_ptr()}ull);"
    ROUTING.compile(tmp_path, call, defines).run(None, -(-width // 1024), tokens, 256)
    want = (results * (ids < experts)[:, :, None]).sum(1)
    want[live:] = 0
    torch.testing.assert_close(out.float(), want.bfloat16().float(), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("halved", "split"), [(0, 4), (1, 4), (0, 8)])
def test_one_token_needs_no_list(tmp_path: Path, gated: bool, halved: int, split: int) -> None:
    case = Case(gated, tokens=1, top_k=len(WIDTHS))
    experts = len(WIDTHS)
    live, counted = torch.ones(1, dtype=torch.int32), torch.ones(2, experts)
    call = case.without_lists(live, counted)
    defines = case.constants | {"DIRECT": 1, "HALVED": halved, "WK": split}
    library = SOURCE.compile(tmp_path, call, defines)
    grid = ((defines["ROW_TILES"] + 1) // 2 << halved, experts)
    arguments = case.arguments(torch.empty(0), torch.empty(experts))
    library.run(ctypes.byref(arguments), *grid, 64 * defines["WK"])
    case.check()
    want = torch.ones(2, experts)
    if gated:
        reference.count_routing(want, case.ids[None], case.weights[None])
    torch.testing.assert_close(counted, want)


def test_expanded_blocks_are_the_reference_s_to_the_bit(tmp_path: Path) -> None:
    rows, cols = 72, 200
    arena, placed, constants = blocks(rows, cols)
    out = torch.zeros(len(WIDTHS), rows, cols).bfloat16()
    counts = torch.ones(len(WIDTHS), dtype=torch.int32)
    counts[3] = 0  # no token: its block is left alone
    tables = (placed.bits, placed.lut_offset, counts)
    where = pointers(torch.empty(0), arena, placed.plane_pages, placed.lut_pages)
    arguments = Arguments(*where, 0, 0, 0, 0, out.data_ptr(), 0, 0, TILE_BYTES)
    constants |= {"TOP_K": 1, "GATED": 0, "EXPAND": 1, "FIRST": 0}
    lists = ", ".join(f"(const int*){tensor.data_ptr()}ull" for tensor in tables)
    library = SOURCE.compile(tmp_path, f"expand(*(const Arguments*)all, {lists}, 0);", constants)
    library.run(ctypes.byref(arguments), constants["ROW_TILES"], len(WIDTHS), 256)
    for expert in range(len(WIDTHS)):
        want = reference.decode_block(arena, placed, expert, torch.bfloat16)
        assert torch.equal(out[expert].float(), want if counts[expert] else torch.zeros(rows, cols))
