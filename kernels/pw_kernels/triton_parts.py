"""Parts of an attention over keys, merged: what `triton_attention` does where keys are split.

Axes as in `reference.py`.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from pw_kernels.triton_overlap import begin as begin_launch

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1.0e30)  # below any score, and finite: differences of it are 0, not NaN


@triton.jit
def merge(
    partial,  # [T, Hq, parts, Dv] fp32
    extremes,  # [T, Hq, parts, 2] fp32
    sinks,  # [Hq] fp32, or anything if not HAS_SINKS
    out,  # [T, Hq, Dv]
    token,
    first_head,
    position,
    window,
    parts,
    GROUP: tl.constexpr,  # heads that are merged
    PADDED_GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    MERGED: tl.constexpr,  # parts of one turn
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Merge the parts of some heads of one query in fixed turns."""
    g = tl.arange(0, PADDED_GROUP)
    dv = tl.arange(0, VALUE_BLOCK)
    head = first_head + g
    row = token * HEADS + head
    total = tl.zeros((PADDED_GROUP, VALUE_BLOCK), dtype=tl.float32)
    peak = tl.full((PADDED_GROUP,), LOWEST, tl.float32)
    mass = tl.zeros((PADDED_GROUP,), tl.float32)
    if HAS_SINKS:
        peak = tl.load(sinks + head, mask=g < GROUP, other=0.0).to(tl.float32) * LOG2E
        mass += 1.0
    low = 0
    if HAS_WINDOW:
        low = tl.maximum(0, position - window + 1)
    begin, end = low // SPLIT, position // SPLIT + 1
    for turn in range(begin // MERGED * MERGED, end, MERGED):
        part = turn + tl.arange(0, MERGED)
        there = (g < GROUP)[:, None] & ((part >= begin) & (part < end))[None, :]
        at = row[:, None] * parts + part[None, :]
        # written by other programs: not from the cache of a multiprocessor
        peaks = tl.load(extremes + at * 2, mask=there, other=LOWEST, cache_modifier=".cg")
        masses = tl.load(extremes + at * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
        values = tl.load(
            partial + at[:, :, None] * VALUE_SIZE + dv[None, None, :],
            mask=there[:, :, None] & (dv < VALUE_SIZE)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        higher = tl.maximum(peak, tl.max(peaks, 1))
        shrink, grow = tl.exp2(peak - higher), tl.exp2(peaks - higher[:, None])
        total = total * shrink[:, None] + tl.sum(values * grow[:, :, None], 1)
        mass = mass * shrink + tl.sum(masses * grow, 1)
        peak = higher
    total = total / tl.where(g < GROUP, mass, 1.0)[:, None]
    tl.store(
        out + (row * VALUE_SIZE)[:, None] + dv[None, :],
        total.to(out.dtype.element_ty),
        mask=(g < GROUP)[:, None] & (dv < VALUE_SIZE)[None, :],
    )


@triton.jit
def merge_kernel(
    partial,  # [T, Hq, parts, Dv] fp32
    extremes,  # [T, Hq, parts, 2] fp32
    query_start,  # [B+1] int32
    seq_lens,  # [B] int32
    sinks,  # [Hq] fp32, or anything if not HAS_SINKS
    out,  # [T, Hq, Dv]
    window,
    parts,
    SEQUENCES: tl.constexpr,
    PADDED_SEQUENCES: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    MERGED: tl.constexpr,  # parts of one turn
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Merge the parts of one (query, head); zero where there is no sequence."""
    begin_launch(OVERLAP)
    token, head = tl.program_id(0), tl.program_id(1)
    b = tl.arange(0, PADDED_SEQUENCES)
    starts = tl.load(query_start + b, mask=b < SEQUENCES, other=0)
    sequence = tl.sum(((starts <= token) & (b < SEQUENCES)).to(tl.int32), 0) - 1
    end = tl.load(query_start + sequence + 1)
    position = tl.load(seq_lens + sequence) - end + token
    if token < end:
        merge(
            partial, extremes, sinks, out, token.to(tl.int64), head, position, window, parts, 1, 1,
            HEADS, VALUE_SIZE, VALUE_BLOCK, SPLIT, MERGED, HAS_WINDOW, HAS_SINKS,
        )  # fmt: skip
    else:
        dv = tl.arange(0, VALUE_BLOCK)
        tl.store(
            out + (token.to(tl.int64) * HEADS + head) * VALUE_SIZE + dv,
            tl.zeros((VALUE_BLOCK,), dtype=out.dtype.element_ty),
            mask=dv < VALUE_SIZE,
        )


COUNTERS = 1 << 14


@cache
def arrived_counters(device: torch.device) -> Tensor:
    """Counters of programs that have done their part of a tile: zeros between launches."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)
