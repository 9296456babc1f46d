"""Normed sums and soft caps of a step in Triton, one launch each: see `sandwich`.

Grids depend on shapes alone and nothing waits for the device. Everything is computed in fp32 and
rounded where it is stored.

Axes as in `sandwich`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pw_kernels.sandwich import NormedSum
from pw_kernels.slots import SlotResults
from pw_kernels.triton_overlap import begin, overlap
from pw_kernels.triton_step import slots_sum

_BLOCK = 2048  # logits of a program


@triton.jit
def _row(rows, number, i, inside, SIZE: tl.constexpr):
    """Columns i of one of some rows, as they are stored; 0 beyond SIZE."""
    return tl.load(rows + number * SIZE + i, mask=inside, other=0.0)


@triton.jit
def _normed(value, eps, SIZE: tl.constexpr):
    """A row over its root mean square; what lies beyond SIZE is 0."""
    return value * tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)


@triton.jit
def _store_product(at, value, weight, inside):
    """A row times a weight, rounded."""
    tl.store(at, (value * weight.to(tl.float32)).to(at.dtype.element_ty), mask=inside)


@triton.jit
def normed_sum_kernel(
    x,  # [T, H]
    first,  # [T, H]
    second,  # [T, H], or fp32 [T * k, H] if TOP_K, or anything if NORMS is 1
    ids,  # [T, k] int64, or anything if not TOP_K
    live,  # [1] int32, or anything if not HAS_LIVE
    norms,  # [NORMS, H]
    following,  # [F, H]
    out,  # [T, H]
    normed,  # [F, T, H]
    tokens,
    experts,
    eps,
    scale,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NORMS: tl.constexpr,  # 1, or 3 of two branches
    FOLLOWING: tl.constexpr,  # F, 1 to 3
    TOP_K: tl.constexpr,  # 0: the second branch is summed up
    HAS_LIVE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One row. Weights, which no earlier launch writes, are there before it waits for these."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < SIZE
    norm_0 = _row(norms, 0, i, inside, SIZE)
    norm_1 = _row(norms, min(1, NORMS - 1), i, inside, SIZE)
    norm_2 = _row(norms, min(2, NORMS - 1), i, inside, SIZE)
    next_0 = _row(following, 0, i, inside, SIZE)
    next_1 = _row(following, min(1, FOLLOWING - 1), i, inside, SIZE)
    next_2 = _row(following, min(2, FOLLOWING - 1), i, inside, SIZE)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    residual = _row(x, token, i, inside, SIZE).to(tl.float32)
    value = _row(first, token, i, inside, SIZE).to(tl.float32)
    if NORMS == 3:
        if TOP_K:
            other = slots_sum(
                second, ids, live, token, experts, i, inside, SIZE, BLOCK, TOP_K, HAS_LIVE
            )
            other = other.to(out.dtype.element_ty).to(tl.float32)
        else:
            other = _row(second, token, i, inside, SIZE).to(tl.float32)
        value = _normed(value, eps, SIZE) * norm_0.to(tl.float32)
        value += _normed(other, eps, SIZE) * norm_1.to(tl.float32)
        value = _normed(value, eps, SIZE) * norm_2.to(tl.float32)
    else:
        value = _normed(value, eps, SIZE) * norm_0.to(tl.float32)
    total = ((residual + value) * scale).to(out.dtype.element_ty)
    tl.store(out + token * SIZE + i, total, mask=inside)
    total = _normed(total.to(tl.float32), eps, SIZE)
    at = normed + token * SIZE + i
    _store_product(at, total, next_0, inside)
    if FOLLOWING > 1:
        _store_product(at + tokens * SIZE, total, next_1, inside)
    if FOLLOWING > 2:
        _store_product(at + 2 * tokens * SIZE, total, next_2, inside)


def normed_sum(
    x: Tensor,
    first: Tensor,
    second: Tensor | SlotResults | None,
    joint: NormedSum,
) -> tuple[Tensor, Tensor]:
    """See `sandwich.normed_sum`."""
    slots = second if isinstance(second, SlotResults) else None
    rows = second.results if isinstance(second, SlotResults) else second
    x, first = x.contiguous(), first.contiguous()
    (tokens, size), count = x.shape, len(joint.following)
    out, normed = x.new_empty(x.shape), x.new_empty(count, tokens, size)
    options = overlap(x.device)
    if second is not None:  # it may come where streams meet, and there is no launch before then
        options = {"OVERLAP": options["OVERLAP"]}
    normed_sum_kernel[(tokens,)](
        x,
        first,
        x if rows is None else rows.contiguous(),
        x if slots is None else slots.ids,
        x if slots is None or slots.live is None else slots.live,
        joint.norms,
        joint.following,
        out,
        normed,
        tokens,
        0 if slots is None else slots.experts,
        joint.epsilon,
        joint.scale,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        NORMS=len(joint.norms),
        FOLLOWING=count,
        TOP_K=0 if slots is None else slots.ids.shape[1],
        HAS_LIVE=slots is not None and slots.live is not None,
        num_warps=8,
        **options,
    )
    return out, normed


@triton.jit
def softcap_kernel(
    logits,  # [N]
    cap,
    count,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A part of all."""
    begin(OVERLAP)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    value = tl.load(logits + i, mask=inside, other=0.0).to(tl.float32) / cap
    value = cap * (2.0 / (1.0 + tl.exp(-2.0 * value)) - 1.0)  # the hyperbolic tangent
    tl.store(logits + i, value.to(logits.dtype.element_ty), mask=inside)


def softcap(logits: Tensor, cap: float) -> Tensor:
    """See `sandwich.softcap`."""
    logits = logits.contiguous()
    count = logits.numel()
    softcap_kernel[(triton.cdiv(count, _BLOCK),)](
        logits, cap, count, BLOCK=_BLOCK, **overlap(logits.device)
    )
    return logits
