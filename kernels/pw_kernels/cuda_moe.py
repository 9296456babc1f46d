"""Fused MoE in CUDA C++ compiled at run time: the fast form on NVIDIA GPUs.

Launches: `route` (tokens to experts, work lists, statistics), then gate_up and down once per class
of width (2-4 bits decode in registers, 5-8 through shared memory), then `combine`. Each block of a
launch finds its expert, width and pages on the device, so widths mix freely and a captured CUDA
graph stays valid while they change. Grids depend on shapes alone. The kernels are in `moe.cu` and
`routing.cu`.

Axes as in `reference.py`. A group is up to 8 * token_tiles slots of one expert, a slot one
(token, expert) pair, S = T * k of them.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from pw_kernels import nvrtc
from pw_kernels.bitplane import MAX_BITS, TILE_COLS, TILE_ROWS
from pw_kernels.pages import WeightPages

KINDS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
MOST_EXPERTS = 1024  # one thread of `route` each
_MMA_TOKENS = 8
_LANES = 32


@dataclass(frozen=True)
class Tuning:
    """How one class of widths is launched.

    Attributes:
        split: Warps that share the columns of a row tile; a block has twice as many.
        blocks: Blocks wanted on a multiprocessor; bounds the registers of a thread.
        stages: Tiles that a warp has in flight, where tables are in registers.
        items: Pairs of row tiles that a block takes in turn, where tables are in shared memory.
    """

    split: int
    blocks: int
    stages: int = 2
    items: int = 1


@dataclass(frozen=True)
class Plan:
    """Launch choices, from shapes alone.

    Attributes:
        token_tiles: Groups have 8 times as many slots.
        low: For widths whose tables are in registers, up to `register_bits`.
        high: For wider ones, whose tables are in shared memory; None launches all widths as `low`.
        register_bits: At most 4.
        widths: Least and greatest width that a block may have.
    """

    token_tiles: int
    low: Tuning
    high: Tuning | None
    register_bits: int = 4
    widths: tuple[int, int] = (2, MAX_BITS)

    @property
    def classes(self) -> tuple[tuple[int, int, Tuning], ...]:
        """Least width, greatest width and tuning of each launch."""
        if self.high is None:
            return ((2, MAX_BITS, self.low),)
        edge = self.register_bits
        return ((2, edge, self.low), (edge + 1, MAX_BITS, self.high))


class _Routing(ctypes.Structure):
    _fields_ = (
        ("ids", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("bits", ctypes.c_void_p * 2),
        ("offsets", ctypes.c_void_p * 2),
        ("work", ctypes.c_void_p * 2),
        ("slots", ctypes.c_void_p),
        ("ranks", ctypes.c_void_p),
        ("statistics", ctypes.c_void_p),
        ("slot_count", ctypes.c_int),
        ("groups", ctypes.c_int),
        ("threshold", ctypes.c_int),
    )


class _Arguments(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("arena", ctypes.c_void_p),
        ("plane_pages", ctypes.c_void_p),
        ("lut_pages", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("work", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("slot_count", ctypes.c_int),
        ("groups", ctypes.c_int),
        ("tile_bytes", ctypes.c_uint),
    )


def fits(
    x: Tensor, arena: Tensor, gate_up: WeightPages, down: WeightPages, lut_dtype: torch.dtype
) -> bool:
    """Whether these kernels can take a call; anything else is for the portable form."""
    inner, page = down.cols, arena.shape[1]
    return (
        x.dtype == lut_dtype
        and lut_dtype in (torch.bfloat16, torch.float16)
        and gate_up.rows == 2 * inner
        and inner % TILE_ROWS == 0
        and gate_up.cols % 8 == 0
        and down.rows % 4 == 0
        and gate_up.experts <= MOST_EXPERTS
        and page >= 4096
        and page & (page - 1) == 0
        and torch.cuda.get_device_capability(x.device) >= (8, 0)
    )


def choose_plan(slots: int, experts: int) -> Plan:
    """The plan for S slots over E experts."""
    each = slots / experts
    if 2 * slots <= experts:  # few blocks: more warps on each
        return Plan(1, Tuning(4, 2), Tuning(4, 2))
    token_tiles = 1 if each <= 6 else 2 if each <= 14 else 4 if each <= 28 else 8
    low_blocks, high_blocks = {1: (5, 2), 2: (4, 2), 4: (3, 1), 8: (2, 1)}[token_tiles]
    return Plan(token_tiles, Tuning(2, low_blocks), Tuning(4, high_blocks, items=2))


def fused_moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    arena: Tensor,
    gate_up: WeightPages,
    down: WeightPages,
    *,
    lut_dtype: torch.dtype,  # noqa: ARG001  that of x
    activation: str,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    statistics: Tensor | None = None,
    plan: Plan | None = None,
) -> Tensor:
    """As `reference.fused_moe`, for calls that `fits` takes; hidden is rounded to x's dtype.

    To `statistics`, [2, E] fp32, the router weights of each expert and their squares are added in
    the same pass, in fixed point. `plan` overrides `choose_plan`.
    """
    tokens, top_k = topk_ids.shape
    count, experts, device = tokens * top_k, gate_up.experts, x.device
    out = torch.empty(tokens, down.rows, dtype=x.dtype, device=device)
    if not tokens:
        return out
    plan = plan or choose_plan(count, experts)
    size = _MMA_TOKENS * plan.token_tiles
    groups = min(count, count // size + experts)
    scratch = torch.empty(
        16 * groups + size * groups + count, dtype=torch.int32, device=device
    )  # two work lists of each module, slots, ranks
    work = (scratch.data_ptr(), scratch.data_ptr() + 32 * groups)
    slots = scratch.data_ptr() + 64 * groups
    x, ids, weights = x.contiguous(), topk_ids.contiguous(), topk_weights.float().contiguous()
    dtype_flags = {"FLOAT16": int(x.dtype == torch.float16), "TOP_K": top_k}
    threads = max(128, min(1024, _power_of_two(max(experts, count))))
    constants = {"EXPERTS": experts, "TOKENS": size, "THREADS": threads, **dtype_flags}
    routing = _Routing(
        ids.data_ptr(), weights.data_ptr(),
        (ctypes.c_void_p * 2)(gate_up.bits.data_ptr(), down.bits.data_ptr()),
        (ctypes.c_void_p * 2)(gate_up.lut_offset.data_ptr(), down.lut_offset.data_ptr()),
        (ctypes.c_void_p * 2)(*work), slots, slots + 4 * size * groups,
        0 if statistics is None else statistics.data_ptr(), count, groups, plan.classes[0][1],
    )  # fmt: skip
    _kernel("routing.cu", "route", constants, device).launch((1,), threads, 0, routing)

    hidden = torch.empty(count, down.cols, dtype=x.dtype, device=device)
    results = torch.empty(count, down.rows, dtype=torch.float32, device=device)
    for module, pages, source, target, bias in (
        (0, gate_up, x, hidden, gate_up_bias),
        (1, down, hidden, results, down_bias),
    ):
        bias = None if bias is None else bias.float().contiguous()
        arguments = _Arguments(
            source.data_ptr(), arena.data_ptr(), pages.plane_pages.data_ptr(),
            pages.lut_pages.data_ptr(),
            0 if bias is None else bias.data_ptr(), weights.data_ptr(), work[module], slots,
            target.data_ptr(), count, groups, 512,
        )  # fmt: skip
        defines = {
            **dtype_flags, **_shape(pages, arena.shape[1]), "GATED": 1 - module,
            "KIND": KINDS[activation], "BIAS": int(bias is not None),
        }  # fmt: skip
        _launch_classes(plan, pages, groups, defines, arguments, device)
    grid = (-(-down.rows // 1024), tokens)
    _kernel("routing.cu", "combine", constants, device).launch(
        grid, 256, 0, ctypes.c_void_p(results.data_ptr()), ctypes.c_void_p(ids.data_ptr()),
        ctypes.c_void_p(out.data_ptr()), ctypes.c_int(down.rows),
    )  # fmt: skip
    return out


def _launch_classes(
    plan: Plan,
    pages: WeightPages,
    groups: int,
    defines: dict[str, int],
    arguments: _Arguments,
    device: torch.device,
) -> None:
    """Launch the kernel of each class of widths that a block of these pages can have."""
    pairs = (-(-pages.rows // TILE_ROWS) + 1) // 2
    widest = min(plan.widths[1], pages.plane_pages.shape[1])
    for number, (low, high, tuning) in enumerate(plan.classes):
        low, high = max(low, plan.widths[0]), min(high, widest)
        if low > high:
            continue
        constants = {
            **defines, "CLASS": number, "LOW": low, "HIGH": high, "NT": plan.token_tiles,
            "WK": tuning.split, "ITEMS": tuning.items, "BLOCKS": tuning.blocks,
            "STAGES": tuning.stages, "TABLE_BITS": plan.register_bits + 1,
            "SHARED_BASE": nvrtc.reserved_shared_bytes(device.index or 0),
        }  # fmt: skip
        shared = max(_shared_bytes(b, plan, tuning) for b in range(low, high + 1))
        _kernel("moe.cu", "experts", constants, device).launch(
            (-(-pairs // tuning.items), groups), 2 * _LANES * tuning.split, shared, arguments
        )


def _shared_bytes(bits: int, plan: Plan, tuning: Tuning) -> int:
    """Dynamic shared memory of a block for one width: tables, parts of sums, tiles in flight."""
    warps, tokens = 2 * tuning.split, plan.token_tiles
    parts = warps * tokens * 1024
    if bits <= plan.register_bits:
        return 2 * (64 << bits) + parts + warps * tuning.stages * (bits + 4 * tokens) * 512
    return (256 << bits) + 2 * parts


def _shape(pages: WeightPages, page_bytes: int) -> dict[str, int]:
    """Constants that describe the blocks of one module."""
    return {
        "ROWS": pages.rows,
        "COLS": pages.cols,
        "ROW_TILES": -(-pages.rows // TILE_ROWS),
        "COL_TILES": -(-pages.cols // TILE_COLS),
        "PLANES": pages.plane_pages.shape[1],
        "PP": pages.plane_pages.shape[2],
        "LP": pages.lut_pages.shape[1],
        "PAGE_SHIFT": page_bytes.bit_length() - 1,
    }


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _kernel(source: str, name: str, defines: dict[str, int], device: torch.device) -> nvrtc.Kernel:
    index = torch.cuda.current_device() if device.index is None else device.index
    return nvrtc.kernel(source, name, tuple(defines.items()), index)
