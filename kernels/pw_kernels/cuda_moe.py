"""Fused MoE in CUDA C++ compiled at run time: the fast form on NVIDIA GPUs.

Launches: `route` (tokens to experts, work lists, statistics; not for a single token), then gate_up
and down once per class of width (2-4 bits decode in registers, 5-8 through shared memory; one class
where no block can have more than 6), then `combine`. Each block of a launch finds its expert, width
and pages on the device, so widths mix freely and a captured CUDA graph stays valid while they
change. Grids depend on shapes alone. The kernels are in `moe.cu` and `routing.cu`.

Axes as in `reference.py`. A group is up to 8 * token_tiles slots of one expert, a slot one
(token, expert) pair, S = T * k of them.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
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
from pw_kernels.slots import Choice, SlotResults, chosen

PROMPT_SLOTS = 200  # of each expert, on average: from here blocks are expanded once for all of them
MOST_EXPERTS = 1024  # one thread of `route` each
LEAST_BITS = 2
REGISTER_BITS = 4  # widest width whose tables are in registers, most of them
_MOST_WITH_NARROW = 6  # bits whose tables blocks of four warps have room for
_FIVE_BLOCKS = 210 << 10  # bytes of shared memory where five such blocks find room
_MMA_TOKENS = 8
_LANES = 32
_TABLES = 64 << 10  # bytes of shared memory for tables of wider ones
_SPREAD = {2: 8 << 10, 3: 0, 4: 4 << 10}  # bytes there of narrower ones; as SPREAD in moe.cu
_ROOMY = 160 << 10  # bytes of shared memory for a block, as data centre GPUs have


@dataclass(frozen=True)
class Tuning:
    """How one class of widths is launched.

    Attributes:
        split: Warps that share the columns of a row tile; a block has twice as many.
        blocks: Blocks wanted on a multiprocessor; bounds the registers of a thread.
        items: Pairs of row tiles that a block takes, where tables are in shared memory.
        queue: As many blocks as the device holds take the items of the list in turn, so that an
            empty list costs little; otherwise an item is a block of the grid.
    """

    split: int
    blocks: int
    items: int = 1
    queue: bool = False


@dataclass(frozen=True)
class Plan:
    """Launch choices, from shapes and possible widths alone.

    Attributes:
        token_tiles: Groups have 8 times as many slots.
        low: For widths up to REGISTER_BITS.
        high: For wider ones, whose tables are in shared memory; None launches all widths as `low`.
        overlap: Launches may begin while the one before ends.
        direct: A single token needs no list: each of its slots is a group. Where a module then has
            few blocks, they take half of the rows of a pair of row tiles.
    """

    token_tiles: int
    low: Tuning
    high: Tuning | None
    overlap: bool = True
    direct: bool = False

    @property
    def classes(self) -> tuple[tuple[int, int, Tuning], ...]:
        """Least width, greatest width and tuning of each launch."""
        if self.high is None:
            return ((LEAST_BITS, MAX_BITS, self.low),)
        return (
            (LEAST_BITS, REGISTER_BITS, self.low),
            (REGISTER_BITS + 1, MAX_BITS, self.high),
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
        and min(gate_up.widths[0], down.widths[0]) >= LEAST_BITS
        and page >= 4096
        and page & (page - 1) == 0
        and torch.cuda.get_device_capability(x.device) >= (8, 0)
    )


def choose_plan(
    slots: int,
    experts: int,
    shared_bytes: int = _ROOMY,
    widths: tuple[int, int] = (LEAST_BITS, MAX_BITS),
) -> Plan:
    """The plan for S slots over E experts.

    Args:
        slots: S.
        experts: E.
        shared_bytes: Shared memory that a block can have on this GPU.
        widths: Least and greatest that a block can have.
    """
    few = 4 * slots <= experts or (2 * slots <= experts and widths[0] > REGISTER_BITS)
    if few:  # blocks: more warps on each, and one launch for all widths
        return Plan(1, Tuning(4, 2), None, direct=True)
    wide: Tuning | None = Tuning(4, 2, items=2, queue=True)
    together = widths[1] <= _MOST_WITH_NARROW
    if slots <= 6 * experts:  # 6 bits alone are quicker by themselves
        if together and widths[0] < _MOST_WITH_NARROW and shared_bytes >= _FIVE_BLOCKS:
            wide = None
        return Plan(1, Tuning(2, 5), wide)
    if shared_bytes < _ROOMY:
        return Plan(2, Tuning(2, 4), Tuning(2, 2, items=2, queue=True))
    if slots <= 24 * experts:
        return Plan(2, Tuning(2, 4), None if together else wide)
    return Plan(4, Tuning(2, 3), Tuning(4, 1, items=2, queue=True))


def fused_moe(
    x: Tensor,
    topk_ids: Tensor | Choice,
    topk_weights: Tensor | None,
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
    the same pass, in fixed point. A `Choice` has its weights with it. Tokens from live[0] on, an
    int32 on the device, are padding. `plan` overrides `choose_plan`. Without `summed`, a batch that
    is no prompt gives its slots.
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
        least, most = zip(gate_up.possible_widths, down.possible_widths, strict=True)
        widths = min(least), max(most)
        plan = choose_plan(count, experts, nvrtc.shared_bytes(device.index or 0), widths)
    direct = plan.direct and tokens == 1
    modules = (gate_up, down)
    if direct:
        routed = _unlisted(*chosen(topk_ids, topk_weights), gate_up, live)
    else:
        routed = route(
            topk_ids, topk_weights, modules, _MMA_TOKENS * plan.token_tiles, plan.classes[0][1],
            statistics, live,
        )  # fmt: skip
    x, groups = x.contiguous(), count if direct else len(routed.slots)
    busy = count if direct else gate_up.experts * (1 - (1 - 1 / experts) ** count)
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
        _launch_classes(plan, pages, groups, busy, defines, (arguments, *more), device)
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
    busy: float,
    defines: dict[str, int],
    arguments: tuple[Any, ...],
    device: torch.device,
) -> None:
    """Launch the kernel of each class of widths that a block of these pages can have.

    Wide ones first: their blocks take longest, and narrow ones run beside the last of them. A block
    of down waits for its group of gate_up; so no block may have a width that `pages` rules out.
    `busy` is the number of groups that there will be on average.
    """
    pairs = (-(-pages.rows // TILE_ROWS) + 1) // 2
    least, most = pages.possible_widths
    index = device.index or 0
    first = 1
    for number, (low, high, tuning) in reversed(list(enumerate(plan.classes))):
        low, high = max(low, least), min(high, most)
        if low > high:
            continue
        items = tuning.items if low > REGISTER_BITS else 1
        whole, widths = tuning, range(low, high + 1)
        if low <= REGISTER_BITS:
            tuning = _split(plan, tuning, widths, pairs * busy, defines["COL_TILES"], index)
        halved = defines["DIRECT"] and tuning == whole and pairs * groups <= _places(index)
        constants = {
            **defines, "CLASS": number, "LOW": low, "HIGH": high, "NT": plan.token_tiles,
            "WK": tuning.split, "ITEMS": items, "BLOCKS": tuning.blocks, "FIRST": first,
            "HALVED": int(halved), "QUEUED": 0,
            "SHARED_BASE": nvrtc.reserved_shared_bytes(index),
        }  # fmt: skip
        shared = max(_shared_bytes(b, plan, tuning, bool(halved)) for b in widths)
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


def _split(
    plan: Plan, tuning: Tuning, widths: range, blocks: float, col_tiles: int, device: int
) -> Tuning:
    """More warps for each block where blocks are few and have many columns each.

    Args:
        plan: Of the call.
        tuning: Of the launch.
        widths: That it takes.
        blocks: That have work, on average.
        col_tiles: Tiles in a row tile.
        device: CUDA device index.
    """
    multiprocessors = nvrtc.device_attribute("MULTIPROCESSOR_COUNT", device)
    room = nvrtc.shared_bytes(device)
    while (
        tuning.blocks > 1
        and 2 * blocks <= tuning.blocks * multiprocessors
        and col_tiles >= 16 * tuning.split
    ):
        wider = replace(tuning, split=2 * tuning.split, blocks=tuning.blocks // 2)
        if max(_shared_bytes(bits, plan, wider) for bits in widths) > room:
            break
        tuning = wider
    return tuning


def _places(device: int) -> int:
    """Blocks that a device holds at once, two on each multiprocessor."""
    return 2 * nvrtc.device_attribute("MULTIPROCESSOR_COUNT", device)


def _shared_bytes(bits: int, plan: Plan, tuning: Tuning, halved: bool = False) -> int:
    """Dynamic shared memory of a block for one width: tables, tiles in flight, parts of sums.

    `halved`: it takes half of the rows (up to REGISTER_BITS; wider ones get what all rows need).
    """
    warps, tokens = 2 * tuning.split, plan.token_tiles
    parts = warps * tokens * 1024
    if bits <= REGISTER_BITS:
        return _SPREAD[bits] + warps * 2 * ((bits * 512 >> halved) + tokens * 2048)
    tiles = 1
    while (
        2 * tiles * (256 << bits) <= _TABLES
        and tiles < 2 * tuning.items
        and warps % (2 * tiles) == 0
    ):
        tiles *= 2
    tables, strip = tiles * (256 << bits), tiles * TILE_ROWS * ((2 << bits) + 16)
    if tiles == 2 * tuning.items:  # nothing more comes to the strip
        return tables + max(strip, parts)
    return tables + strip + (2 * parts if tiles == 1 else parts)
