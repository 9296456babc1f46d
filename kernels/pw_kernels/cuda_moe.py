"""Fused MoE in CUDA C++ compiled at run time: the fast form on NVIDIA GPUs.

Launches: `route` (tokens to experts, work lists, statistics; not for a single token), then gate_up
and down once per class of width (2-4 bits decode in registers, 5-8 through shared memory), then
`combine`. Each block of a launch finds its expert, width and pages on the device, so widths mix
freely and a captured CUDA graph stays valid while they change. Grids depend on shapes alone. The
kernels are in `moe.cu` and `routing.cu`.

Axes as in `reference.py`. A group is up to 8 * token_tiles slots of one expert, a slot one
(token, expert) pair, S = T * k of them.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pw_kernels import cuda_prefill, cuda_prompts, nvrtc
from pw_kernels.bitplane import MAX_BITS, TILE_BYTES, TILE_ROWS
from pw_kernels.cuda_routing import (
    KINDS,
    Routed,
    TiledArguments,
    combine,
    kernel,
    route,
    shape_constants,
)
from pw_kernels.pages import WeightPages
from pw_kernels.slots import SlotResults

PROMPT_SLOTS = 200  # of each expert, on average: from here blocks are expanded once for all of them
MOST_EXPERTS = 1024  # one thread of `route` each
_MMA_TOKENS = 8
_LANES = 32
_PAIRS_BYTES = {2: 14 << 10, 3: 32 << 10}  # of the tables of a block
_ROOMY = 160 << 10  # bytes of shared memory for a block, as data centre GPUs have


@dataclass(frozen=True)
class Tuning:
    """How one class of widths is launched.

    Attributes:
        split: Warps that share the columns of a row tile; a block has twice as many.
        blocks: Blocks wanted on a multiprocessor; bounds the registers of a thread.
        items: Pairs of row tiles that a block takes, where tables are in shared memory.
        resident: Bytes of shared memory for tables, there: a block takes as many row tiles at once
            as fit, and the rest in turn.
        pingpong: Two turns of the loop instead of one, so that no register is copied; up to 6 bits.
        queue: As many blocks as the device holds take the items of the list in turn, so that an
            empty list costs little; otherwise an item is a block of the grid.
        pairs: Up to this width, 3 at most, half of the rows look up two weights at once in shared
            memory: 14 KB at 2 bits, 32 KB at 3. Not where a block takes half of the rows.
    """

    split: int
    blocks: int
    items: int = 1
    resident: int = 64 << 10
    pingpong: bool = False
    queue: bool = False
    pairs: int = 2


@dataclass(frozen=True)
class Plan:
    """Launch choices, from shapes alone.

    Attributes:
        token_tiles: Groups have 8 times as many slots.
        low: For widths whose tables are in registers, up to `register_bits`.
        high: For wider ones, whose tables are in shared memory; None launches all widths as `low`.
        register_bits: At most 4.
        overlap: Launches may begin while the one before ends.
        direct: A single token needs no list: each of its slots is a group. Where a module then has
            few blocks, they take half of the rows of a pair of row tiles (up to `register_bits`).
    """

    token_tiles: int
    low: Tuning
    high: Tuning | None
    register_bits: int = 4
    overlap: bool = True
    direct: bool = False

    @property
    def classes(self) -> tuple[tuple[int, int, Tuning], ...]:
        """Least width, greatest width and tuning of each launch."""
        if self.high is None:
            return ((2, MAX_BITS, self.low),)
        edge = self.register_bits
        return ((2, edge, self.low), (edge + 1, MAX_BITS, self.high))


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


def choose_plan(slots: int, experts: int, shared_bytes: int = _ROOMY) -> Plan:
    """The plan for S slots over E experts, on a GPU with that much shared memory for a block."""
    if 2 * slots <= experts:  # few blocks: more warps on each, and one launch for all widths
        return Plan(1, Tuning(4, 2), None, direct=True)
    if slots <= 6 * experts:
        return Plan(1, Tuning(2, 5), Tuning(4, 2, items=2, pingpong=True, queue=True))
    if shared_bytes < _ROOMY:
        return Plan(2, Tuning(2, 4), Tuning(2, 2, items=2, queue=True))
    if slots <= 24 * experts:
        return Plan(2, Tuning(2, 4), Tuning(4, 2, items=2, queue=True))
    return Plan(4, Tuning(2, 3), Tuning(4, 1, items=2, queue=True))


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
    live: Tensor | None = None,
    plan: Plan | None = None,
    summed: bool = True,
) -> Tensor | SlotResults:
    """As `reference.fused_moe`, for calls that `fits` takes; hidden is rounded to x's dtype.

    To `statistics`, [2, E] fp32, the router weights of each expert and their squares are added in
    the same pass, in fixed point. Tokens from live[0] on, an int32 on the device, are padding.
    `plan` overrides `choose_plan`. Without `summed`, a batch that is no prompt gives its slots.
    """
    tokens, top_k = topk_ids.shape
    count, experts, device = tokens * top_k, gate_up.spread, x.device
    out = torch.empty(tokens, down.rows, dtype=x.dtype, device=device)
    if not tokens:
        return out
    if plan is None and cuda_prompts.wins(count, experts, device):
        return cuda_prompts.fused_moe(
            x, topk_ids, topk_weights, arena, gate_up, down,
            cuda_prompts.choose_plan(count, experts), activation=activation,
            gate_up_bias=gate_up_bias, down_bias=down_bias, statistics=statistics, live=live,
        )  # fmt: skip
    if plan is None and count >= PROMPT_SLOTS * experts:
        return cuda_prefill.fused_moe(
            x, topk_ids, topk_weights, arena, gate_up, down, activation=activation,
            gate_up_bias=gate_up_bias, down_bias=down_bias, statistics=statistics, live=live,
        )  # fmt: skip
    if plan is None:
        plan = choose_plan(count, experts, nvrtc.shared_bytes(device.index or 0))
    direct = plan.direct and tokens == 1
    modules = (gate_up, down)
    if direct:
        routed = _unlisted(topk_ids, topk_weights, gate_up, live)
    else:
        routed = route(
            topk_ids, topk_weights, modules, _MMA_TOKENS * plan.token_tiles, plan.classes[0][1],
            statistics, live,
        )  # fmt: skip
    x, groups = x.contiguous(), count if direct else len(routed.slots)
    hidden = torch.empty(count, down.cols, dtype=x.dtype, device=device)
    results = torch.empty(count, down.rows, dtype=torch.float32, device=device)
    for module, pages, source, target, bias in (
        (0, gate_up, x, hidden, gate_up_bias),
        (1, down, hidden, results, down_bias),
    ):
        bias = None if bias is None else bias.float().contiguous()
        arguments = TiledArguments(
            source.data_ptr(), arena.data_ptr(), pages.plane_pages.data_ptr(),
            pages.lut_pages.data_ptr(), 0 if bias is None else bias.data_ptr(),
            routed.weights.data_ptr(), routed.work[module].data_ptr(), routed.slots.data_ptr(),
            target.data_ptr(), count, groups, TILE_BYTES,
            0 if routed.progress is None else routed.progress.data_ptr(), 0,
            down.cols // TILE_ROWS,
        )  # fmt: skip
        more = (_direct(routed, pages, statistics),) if direct else ()
        defines = {
            **shape_constants(pages, arena.shape[1]), "FLOAT16": int(x.dtype == torch.float16),
            "TOP_K": top_k, "GATED": 1 - module, "KIND": KINDS[activation],
            "BIAS": int(bias is not None), "EXPAND": 0, "DIRECT": int(direct),
        }  # fmt: skip
        _launch_classes(plan, pages, groups, defines, (arguments, *more), device)
    if not summed:
        return SlotResults(results, routed.ids, gate_up.experts, live)
    combine(results, routed, out, overlap=plan.overlap)
    return out


class _Direct(ctypes.Structure):
    """`Direct` of moe.cu."""

    _fields_ = (
        ("ids", ctypes.c_void_p),
        ("bits", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("live", ctypes.c_void_p),
        ("statistics", ctypes.c_void_p),
        ("experts", ctypes.c_int),
    )


def _direct(routed: Routed, pages: WeightPages, statistics: Tensor | None) -> _Direct:
    return _Direct(
        routed.ids.data_ptr(), pages.bits.data_ptr(), pages.lut_offset.data_ptr(),
        0 if routed.live is None else routed.live.data_ptr(),
        0 if statistics is None else statistics.data_ptr(), pages.experts,
    )  # fmt: skip


def _unlisted(ids: Tensor, weights: Tensor, pages: WeightPages, live: Tensor | None) -> Routed:
    """What a call without lists knows of its slots."""
    none = torch.empty(0, dtype=torch.int32, device=ids.device)
    counts = pages.bits  # of which only the length is read
    return Routed((none, none), none, counts, ids.contiguous(), weights.float().contiguous(), live)


def _launch_classes(
    plan: Plan,
    pages: WeightPages,
    groups: int,
    defines: dict[str, int],
    arguments: tuple[Any, ...],
    device: torch.device,
) -> None:
    """Launch the kernel of each class of widths that a block of these pages can have.

    Wide ones first: their blocks take longest, and narrow ones run beside the last of them. A block
    of down waits for its group of gate_up; so no block may have a width that `pages` rules out.
    """
    pairs = (-(-pages.rows // TILE_ROWS) + 1) // 2
    planes = pages.plane_pages.shape[1]
    index = device.index or 0
    first = 1
    for number, (low, high, tuning) in reversed(list(enumerate(plan.classes))):
        high = min(high, planes)
        if low > min(high, pages.widths[1]) or high < pages.widths[0]:
            continue
        items = tuning.items if low > plan.register_bits else 1
        halved = defines["DIRECT"] and pairs * groups <= _places(index)
        constants = {
            **defines, "CLASS": number, "LOW": low, "HIGH": high, "NT": plan.token_tiles,
            "WK": tuning.split, "ITEMS": items, "BLOCKS": tuning.blocks,
            "TABLE_BITS": plan.register_bits + 1, "FIRST": first, "RESIDENT": tuning.resident,
            "PINGPONG": int(tuning.pingpong), "PAIR_BITS": 0 if halved else tuning.pairs,
            "HALVED": int(halved), "QUEUED": 0, "SHARED_BASE": nvrtc.reserved_shared_bytes(index),
        }  # fmt: skip
        shared = max(_shared_bytes(b, plan, tuning) for b in range(low, high + 1))
        units = -(-pairs // items) << constants["HALVED"]
        grid: tuple[int, ...] = (units, groups)
        if tuning.queue and not defines["DIRECT"]:
            constants["QUEUED"], shared = shared, shared + 16
            places = tuning.blocks * nvrtc.device_attribute("MULTIPROCESSOR_COUNT", index)
            grid = (min(places, units * groups),)
            arguments[0].queue = arguments[0].done + 4 * (groups + 2 * defines["GATED"] + number)
        kernel("moe.cu", "experts", constants, device).launch(
            grid, 2 * _LANES * tuning.split, shared, *arguments, overlap=plan.overlap
        )
        first = 0


def _places(device: int) -> int:
    """Blocks that a device holds at once, two on each multiprocessor."""
    return 2 * nvrtc.device_attribute("MULTIPROCESSOR_COUNT", device)


def _shared_bytes(bits: int, plan: Plan, tuning: Tuning) -> int:
    """Dynamic shared memory of a block for one width: tables, tiles in flight, parts of sums."""
    warps, tokens = 2 * tuning.split, plan.token_tiles
    parts = warps * tokens * 1024
    if bits <= plan.register_bits:
        spread = 4096 if bits == 4 else _PAIRS_BYTES[bits] if bits <= tuning.pairs else 0
        return spread + warps * 2 * (bits * 512 + tokens * 2048)
    tiles = 1
    while (
        2 * tiles * (256 << bits) <= tuning.resident
        and tiles < 2 * tuning.items
        and warps % (2 * tiles) == 0
    ):
        tiles *= 2
    return tiles * cuda_prefill.table_bytes(bits) + (2 * parts if tiles == 1 else parts)
