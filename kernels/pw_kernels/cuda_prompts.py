"""Fused MoE for prompts on GPUs of compute capability 9.0: planes decoded into the matrix unit.

With many tokens for each expert the matrix unit is the limit, so a weight is decoded once for a
whole group of tokens, in registers, and never written anywhere. Launches: `route`, `arrange` (the
inputs as the matrix unit wants them), gate_up, down, `combine`. Nothing waits for the device and
grids depend on shapes alone. The kernels are in `prompts.cu`.

Axes as in `reference.py`; S = T * k slots. A group is up to `Plan.slots` slots of one expert.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from pw_kernels import nvrtc
from pw_kernels.bitplane import MAX_BITS
from pw_kernels.cuda_routing import (
    KINDS,
    Arguments,
    Routed,
    combine,
    kernel,
    route,
    shape_constants,
)
from pw_kernels.pages import WeightPages
from pw_kernels.slots import Choice

NARROW_BITS = 4  # widths up to which blocks take less room
LEAST_SLOTS = 16  # of each expert, on average, from which on this form is the fastest
_CAPABILITY = (9, 0)  # alone has the warpgroup matrix unit
_ROOM = 227 << 10  # bytes of shared memory that a block can have there
_THREADS = 128  # of a warpgroup
_RESERVED = 1024  # bytes of shared memory that each block takes beside its own
_SIZES = (32, 48, 96, 160, 192)  # of groups
_DECODING = 128  # what a group's decoding costs, in places of it
_CHUNK = 64  # columns of the image that lie together


@dataclass(frozen=True)
class Tuning:
    """How the products of a module are launched.

    Attributes:
        warpgroups: Of a block; each takes 64 rows.
        blocks: On a multiprocessor.
    """

    warpgroups: int
    blocks: int


@dataclass(frozen=True)
class Plan:
    """Launch choices, from shapes alone.

    Attributes:
        slots: Of a group, a multiple of 16 up to 256.
        wide: Takes all widths.
        narrow: Takes the place of `wide` for a module none of whose blocks can have more than
            NARROW_BITS; None: `wide` takes these, too.
        overlap: Launches may begin while the one before ends.
    """

    slots: int
    wide: Tuning
    narrow: Tuning | None = None
    overlap: bool = True


def wins(slots: int, experts: int, device: torch.device) -> bool:
    """Whether S slots over E experts are better off here than with the kernels of decode steps."""
    return (
        slots >= LEAST_SLOTS * experts
        and torch.cuda.get_device_capability(device) == _CAPABILITY
        and nvrtc.shared_bytes(device.index or 0) >= _ROOM
    )


def choose_plan(slots: int, experts: int) -> Plan:
    """The plan for S slots over E experts: groups whose decoding and products cost least.

    A group costs its places and what it takes to decode the weights for it. There are few sizes,
    since each is compiled when it is first met. One launch takes all widths: another would start
    as many blocks to find nothing, and wait for the slowest of the first.
    """
    mean = slots / experts
    size = min(_SIZES, key=lambda size: _groups(mean, size) * (size + _DECODING))
    if size <= 48:
        return Plan(size, Tuning(2, 2), narrow=Tuning(2, 3))
    return Plan(size, Tuning(3, 1), narrow=Tuning(2, 2) if size <= 160 else None)


def _groups(mean: float, size: int) -> float:
    """Groups that an expert needs on average, if counts vary by about the root of their mean."""
    deviation = math.sqrt(2 * mean)
    most = math.ceil((mean + 3 * deviation) / size)
    return 1 + sum(math.erfc((i * size - mean) / deviation) / 2 for i in range(1, most + 1))


def fused_moe(
    x: Tensor,
    topk_ids: Tensor | Choice,
    topk_weights: Tensor | None,
    arena: Tensor,
    gate_up: WeightPages,
    down: WeightPages,
    plan: Plan,
    *,
    activation: str,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    statistics: Tensor | None = None,
    live: Tensor | None = None,
) -> Tensor:
    """As `cuda_moe.fused_moe`, for any number of tokens."""
    modules, device, count = (gate_up, down), x.device, topk_ids.numel()
    routed = route(topk_ids, topk_weights, modules, plan.slots, MAX_BITS, statistics, live)
    places = routed.slots.numel()
    inputs, hidden = (
        torch.empty(places * -(-pages.cols // _CHUNK) * _CHUNK, dtype=x.dtype, device=device)
        for pages in modules
    )
    results = torch.empty(count, down.rows, dtype=torch.float32, device=device)
    out = torch.empty(x.shape[0], down.rows, dtype=x.dtype, device=device)
    common: dict[str, nvrtc.Define] = {
        "FLOAT16": int(x.dtype == torch.float16), "TOP_K": topk_ids.shape[1],
        "KIND": KINDS[activation], "SLOTS": plan.slots, **unit_macros(plan.slots),
        "SHARED_BASE": nvrtc.reserved_shared_bytes(device.index or 0),
    }  # fmt: skip
    _arrange(x.contiguous(), routed, inputs, common, gate_up, arena.shape[1], plan.overlap)
    for module, pages, source, target, bias in (
        (0, gate_up, inputs, hidden, gate_up_bias),
        (1, down, hidden, results, down_bias),
    ):
        bias = None if bias is None else bias.float().contiguous()
        arguments = Arguments(
            source.data_ptr(), arena.data_ptr(), pages.plane_pages.data_ptr(),
            pages.lut_pages.data_ptr(), 0 if bias is None else bias.data_ptr(),
            routed.weights.data_ptr(), routed.work[module].data_ptr(), routed.slots.data_ptr(),
            target.data_ptr(), count, len(routed.slots),
        )  # fmt: skip
        constants = {
            **common, **shape_constants(pages, arena.shape[1]), "GATED": 1 - module,
            "BIAS": int(bias is not None),
        }  # fmt: skip
        _launch(plan, pages, constants, arguments, device)
    combine(results, routed, out, overlap=plan.overlap)
    return out


def _launch(
    plan: Plan,
    pages: WeightPages,
    constants: Mapping[str, nvrtc.Define],
    arguments: Arguments,
    device: torch.device,
) -> None:
    """Launch the products of a module, for the widths that a block of it can have."""
    low, high = pages.possible_widths
    narrow = plan.narrow if high <= NARROW_BITS else None
    tuning = plan.wide if narrow is None else narrow
    room = shared_bytes(tuning.blocks, nvrtc.shared_bytes(device.index or 0))
    defines = {
        **constants, "LOW": low, "HIGH": high, "ROOM": room, "BLOCKS": tuning.blocks,
        "GROUPS_OF_WARPS": tuning.warpgroups,
    }  # fmt: skip
    kernel("prompts.cu", "experts", defines, device).launch(
        (row_blocks(pages, bool(constants["GATED"]), tuning), arguments.groups),
        _THREADS * tuning.warpgroups, room, arguments, overlap=plan.overlap,
    )  # fmt: skip


def row_blocks(pages: WeightPages, gated: bool, tuning: Tuning) -> int:
    """Blocks that share the rows of a module; for hidden, whole chunks of its image."""
    tiles = 2 * -(-pages.rows // (2 * _CHUNK)) if gated else -(-pages.rows // _CHUNK)
    return -(-tiles // tuning.warpgroups)


def shared_bytes(blocks: int, limit: int) -> int:
    """Dynamic shared memory of each of so many blocks, where one could have `limit` alone."""
    return ((limit + _RESERVED) // blocks - _RESERVED) // 1024 * 1024


@cache
def unit_macros(slots: int) -> Mapping[str, str]:
    """Text of the matrix unit's instruction for so many slots: operands cannot be looped over."""
    sums = slots // 2
    inputs = ",".join(f"%{sums + i}" for i in range(4))
    return {
        "COLUMNS": f'"{slots}"',
        "SUMS": '"{' + ",".join(f"%{i}" for i in range(sums)) + '}"',
        "INPUTS": f'"{{{inputs}}},%{sums + 4}"',
        "OPERANDS": ",".join(f'"+f"(c[{i}])' for i in range(sums)),
    }


def _arrange(
    x: Tensor,
    routed: Routed,
    image: Tensor,
    constants: Mapping[str, nvrtc.Define],
    pages: WeightPages,
    page_bytes: int,
    overlap: bool,
) -> None:
    """Gather the rows of x [T, K] that each group needs into its image."""
    groups, places = routed.slots.shape
    defines = {
        **constants, **shape_constants(pages, page_bytes), "GATED": 1, "BIAS": 0,
        "LOW": 1, "HIGH": 0, "ROOM": _ROOM, "BLOCKS": 1, "GROUPS_OF_WARPS": 2,
    }  # fmt: skip
    jobs = groups * places * 8 * -(-pages.cols // _CHUNK)
    pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (x, routed.slots, image))
    kernel("prompts.cu", "arrange", defines, x.device).launch(
        (-(-jobs // 1024),), 256, 0, *pointers, ctypes.c_int(routed.ids.numel()),
        ctypes.c_int(groups), overlap=overlap,
    )  # fmt: skip
