"""What the CUDA forms of the MoE share: tokens grouped by expert, arguments, the last sum.

`route` runs one block of `routing.cu`: it groups the slots of each expert, lists the groups with
width and table of their blocks for both modules, and adds up routing statistics. Nothing here
waits for the device.

Axes as in `reference.py`. S = T * k slots, G groups (a bound that depends on shapes alone).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from pw_kernels import nvrtc
from pw_kernels.bitplane import TILE_COLS, TILE_ROWS
from pw_kernels.pages import WeightPages
from pw_kernels.slots import Choice, chosen

KINDS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
_QUEUES = 4  # counters: one for each module and class


class Lists(ctypes.Structure):
    """`Routing` of lists.cuh."""

    _fields_ = (
        ("ids", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("bits", ctypes.c_void_p * 2),
        ("offsets", ctypes.c_void_p * 2),
        ("work", ctypes.c_void_p * 2),
        ("slots", ctypes.c_void_p),
        ("ranks", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("statistics", ctypes.c_void_p),
        ("live", ctypes.c_void_p),
        ("progress", ctypes.c_void_p),
        ("slot_count", ctypes.c_int),
        ("groups", ctypes.c_int),
        ("threshold", ctypes.c_int),
        ("progress_count", ctypes.c_int),
        ("least", ctypes.c_int * 2),
        ("most", ctypes.c_int * 2),
    )


class Arguments(ctypes.Structure):
    """`Arguments` of prompts.cu, with which those of moe.cu begin."""

    _fields_: ClassVar[tuple[tuple[str, Any], ...]] = (
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
    )


class TiledArguments(Arguments):
    """`Arguments` of moe.cu."""

    _fields_ = (
        ("tile_bytes", ctypes.c_uint),
        ("done", ctypes.c_void_p),
        ("queue", ctypes.c_void_p),
        ("hidden_pairs", ctypes.c_uint),
    )


@dataclass(frozen=True)
class Routed:
    """Slots grouped by expert.

    Attributes:
        work: For gate_up and down, [2 classes, G, 4] int32: group, expert or -1, width, offset;
            the widest first.
        slots: [G, size] int32 in no order; S for an unused place.
        counts: [E] int32 slots of each expert.
        ids: [T, k] int64.
        weights: [T, k] fp32.
        live: [1] int32 tokens that are real; None: all are.
        progress: [G + 4] int32 zeros, which the launches behind count up.
    """

    work: tuple[Tensor, Tensor]
    slots: Tensor
    counts: Tensor
    ids: Tensor
    weights: Tensor
    live: Tensor | None = None
    progress: Tensor | None = None


def route(
    topk_ids: Tensor | Choice,
    topk_weights: Tensor | None,
    modules: tuple[WeightPages, WeightPages],
    size: int,
    threshold: int,
    statistics: Tensor | None,
    live: Tensor | None = None,
) -> Routed:
    """Group the slots of each expert by `size`; widths up to `threshold` are the first class."""
    experts = modules[0].experts
    if isinstance(topk_ids, Choice) and topk_ids.experts == experts:
        ids, weights, launch = topk_ids.ids, topk_ids.weights, topk_ids.launch
    else:
        topk_ids, topk_weights = chosen(topk_ids, topk_weights)
        ids, weights = topk_ids.contiguous(), topk_weights.float().contiguous()
        launch = partial(_launch, ids, experts)
    count, device = ids.numel(), ids.device
    groups = most_groups(count, experts, size)
    sizes = [8 * groups, 8 * groups, size * groups, count, experts, groups + _QUEUES]
    scratch = torch.empty(sum(sizes), dtype=torch.int32, device=device)
    if nvrtc.rehearsing():
        scratch.fill_(-1)  # no group has an expert: Triton's kernels do run, and read these lists
    gate_up, down, slots, ranks, counts, progress = torch.split(scratch, sizes)
    pair, two = ctypes.c_void_p * 2, ctypes.c_int * 2
    least, most = (two(*bound) for bound in zip(*(m.possible_widths for m in modules), strict=True))
    arguments = Lists(
        ids.data_ptr(), weights.data_ptr(), pair(*(m.bits.data_ptr() for m in modules)),
        pair(*(m.lut_offset.data_ptr() for m in modules)),
        pair(gate_up.data_ptr(), down.data_ptr()), slots.data_ptr(), ranks.data_ptr(),
        counts.data_ptr(), _address(statistics), _address(live), progress.data_ptr(), count,
        groups, threshold, len(progress), least, most,
    )  # fmt: skip
    launch(arguments, size)
    work = (gate_up.view(2, groups, 4), down.view(2, groups, 4))
    return Routed(work, slots.view(groups, size), counts, ids, weights, live, progress)


def most_groups(count: int, experts: int, size: int) -> int:
    """Groups that so many slots can come to: an expert's first slot begins one, then `size` do."""
    return min(count, experts + max(count - experts, 0) // size)


def _launch(ids: Tensor, experts: int, lists: Lists, size: int) -> None:
    threads = max(128, min(1024, _power_of_two(max(experts, ids.numel()))))
    constants = {
        "EXPERTS": experts, "TOKENS": size, "THREADS": threads, "TOP_K": ids.shape[1],
        "FLOAT16": 0,
    }  # fmt: skip
    run = kernel("routing.cu", "route", constants, ids.device)
    run.launch((1,), threads, 0, lists, overlap=True)


def combine(results: Tensor, routed: Routed, out: Tensor, overlap: bool = False) -> None:
    """Add the weighted results [S, H] fp32 of each token, in slot order, into out [T, H].

    `overlap`: as in `Kernel.launch`.
    """
    tokens, width = out.shape
    constants = {
        "EXPERTS": routed.counts.numel(), "TOKENS": 8, "THREADS": 128,
        "TOP_K": routed.ids.shape[1], "FLOAT16": int(out.dtype == torch.float16),
    }  # fmt: skip
    pointers = (ctypes.c_void_p(t.data_ptr()) for t in (results, routed.ids, out))
    kernel("routing.cu", "combine", constants, out.device).launch(
        (-(-width // 1024), tokens), 256, 0, *pointers, ctypes.c_int(width),
        ctypes.c_void_p(_address(routed.live)), overlap=overlap,
    )  # fmt: skip


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def shape_constants(pages: WeightPages, page_bytes: int) -> dict[str, int]:
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


def kernel(
    source: str, name: str, defines: Mapping[str, nvrtc.Define], device: torch.device
) -> nvrtc.Kernel:
    """A kernel with these macros for a device, compiled once."""
    return nvrtc.kernel(source, name, tuple(defines.items()), nvrtc.index_of(device))
