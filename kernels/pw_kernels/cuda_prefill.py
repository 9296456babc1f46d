"""Fused MoE for long prompts on GPUs that `cuda_prompts` cannot take: blocks expanded to matrices.

With many tokens for each expert the matrix unit is the limit, so decoding must not be repeated.
Blocks of some experts at a time are written to a bounded scratch by the decoders of `moe.cu`, and
a grouped matmul in Triton reads them. Nothing waits for the device.

Axes as in `reference.py`; S = T * k slots.
"""

from __future__ import annotations

import ctypes

import torch
import triton
from torch import Tensor

from pw_kernels import nvrtc
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
from pw_kernels.slots import Choice
from pw_kernels.triton_grouped import grouped_kernel

SCRATCH_BYTES = 256 << 20
GROUP_SLOTS = 128
_ROWS = 128  # of a tile of the matmul
_SPLIT = 4


def fused_moe(
    x: Tensor,
    topk_ids: Tensor | Choice,
    topk_weights: Tensor | None,
    arena: Tensor,
    gate_up: WeightPages,
    down: WeightPages,
    *,
    activation: str,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    statistics: Tensor | None = None,
    live: Tensor | None = None,
) -> Tensor:
    """As `cuda_moe.fused_moe`, for any number of tokens."""
    modules = (gate_up, down)
    routed = route(topk_ids, topk_weights, modules, GROUP_SLOTS, MAX_BITS, statistics, live)
    count, top_k = topk_ids.numel(), topk_ids.shape[1]
    hidden = torch.empty(count, down.cols, dtype=x.dtype, device=x.device)
    results = torch.empty(count, down.rows, dtype=torch.float32, device=x.device)
    out = torch.empty(x.shape[0], down.rows, dtype=x.dtype, device=x.device)
    largest = max(pages.rows * pages.cols for pages in modules)
    chunk = max(1, min(gate_up.experts, SCRATCH_BYTES // (2 * largest)))
    scratch = torch.empty(chunk * largest, dtype=x.dtype, device=x.device)
    for first in range(0, gate_up.experts, chunk):
        last = min(first + chunk, gate_up.experts)
        _expand(arena, gate_up, routed, scratch, first, last)
        _multiply(
            x.contiguous(), scratch, hidden, routed, 0, gate_up, first, last, top_k, gate_up_bias,
            KINDS[activation],
        )  # fmt: skip
    for first in range(0, gate_up.experts, chunk):
        last = min(first + chunk, gate_up.experts)
        _expand(arena, down, routed, scratch, first, last)
        _multiply(hidden, scratch, results, routed, 1, down, first, last, 1, down_bias, 0)
    combine(results, routed, out)
    return out


def table_bytes(bits: int) -> int:
    """Shared memory for the tables of a row tile: spread out, and as they come from the arena."""
    return (256 << bits) + TILE_ROWS * ((2 << bits) + 16)


def _expand(
    arena: Tensor, pages: WeightPages, routed: Routed, scratch: Tensor, first: int, last: int
) -> None:
    """Write the blocks of experts first to last, those that have tokens: [last - first, N, K]."""
    device = arena.device
    widest = pages.plane_pages.shape[1]
    constants = {
        **shape_constants(pages, arena.shape[1]), "FLOAT16": 0, "TOP_K": 1, "GATED": 0, "KIND": 0,
        "BIAS": 0, "CLASS": 0, "LOW": 2, "HIGH": widest, "NT": 1, "WK": _SPLIT, "ITEMS": 1,
        "BLOCKS": 2, "FIRST": 0, "EXPAND": 1,
        "SHARED_BASE": nvrtc.reserved_shared_bytes(device.index or 0),
    }  # fmt: skip
    arguments = TiledArguments(
        0, arena.data_ptr(), pages.plane_pages.data_ptr(), pages.lut_pages.data_ptr(), 0, 0, 0, 0,
        scratch.data_ptr(), 0, 0, TILE_BYTES,
    )  # fmt: skip
    pointers = (pages.bits, pages.lut_offset, routed.counts)
    kernel("moe.cu", "expand", constants, device).launch(
        (constants["ROW_TILES"], last - first), 64 * _SPLIT, table_bytes(widest), arguments,
        *(ctypes.c_void_p(tensor.data_ptr()) for tensor in pointers), ctypes.c_int(first),
    )  # fmt: skip


def _multiply(
    source: Tensor,
    matrices: Tensor,
    target: Tensor,
    routed: Routed,
    module: int,
    pages: WeightPages,
    first: int,
    last: int,
    top_k: int,
    bias: Tensor | None,
    kind: int,
) -> None:
    """Multiply the slots of experts first to last with their expanded blocks."""
    gated = module == 0
    width = target.shape[1]
    grid = (triton.cdiv(width, _ROWS // 2 if gated else _ROWS), len(routed.slots))
    grouped_kernel[grid](
        source, matrices, target, routed.work[module], routed.slots,
        routed.weights if bias is None else bias.float().contiguous(), routed.weights,
        routed.ids.numel(), first, last, TOP_K=top_k, COLS=pages.cols, ALL_ROWS=pages.rows,
        WIDTH=width, SLOTS=GROUP_SLOTS, ROWS=_ROWS, STEP=64, GATED=gated, KIND=kind,
        HAS_BIAS=bias is not None, num_warps=8, num_stages=3,
    )  # fmt: skip
