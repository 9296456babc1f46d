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
def _normed(value, eps, SIZE: tl.constexpr):
    """A row over its root mean square; what lies beyond SIZE is 0."""
    return value * tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)


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
    FOLLOWING: tl.constexpr,  # F
    TOP_K: tl.constexpr,  # 0: the second branch is summed up
    HAS_LIVE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One row."""
    begin(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < SIZE
    residual = tl.load(x + token * SIZE + i, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(first + token * SIZE + i, mask=inside, other=0.0).to(tl.float32)
    value = _normed(value, eps, SIZE)
    value = value * tl.load(norms + i, mask=inside, other=0.0).to(tl.float32)
    if NORMS == 3:
        if TOP_K:
            other = slots_sum(
                second, ids, live, token, experts, i, inside, SIZE, BLOCK, TOP_K, HAS_LIVE
            )
            other = other.to(out.dtype.element_ty).to(tl.float32)
        else:
            other = tl.load(second + token * SIZE + i, mask=inside, other=0.0).to(tl.float32)
        other = _normed(other, eps, SIZE)
        value += other * tl.load(norms + SIZE + i, mask=inside, other=0.0).to(tl.float32)
        value = _normed(value, eps, SIZE)
        value = value * tl.load(norms + 2 * SIZE + i, mask=inside, other=0.0).to(tl.float32)
    total = ((residual + value) * scale).to(out.dtype.element_ty)
    tl.store(out + token * SIZE + i, total, mask=inside)
    total = _normed(total.to(tl.float32), eps, SIZE)
    for f in tl.static_range(FOLLOWING):
        weight = tl.load(following + f * SIZE + i, mask=inside, other=0.0).to(tl.float32)
        target = normed + (f * tokens + token) * SIZE + i
        tl.store(target, (total * weight).to(normed.dtype.element_ty), mask=inside)


def normed_sum(
    x: Tensor,
    first: Tensor,
    second: Tensor | SlotResults | None,
    joint: NormedSum,
    overlapping: bool,
) -> tuple[Tensor, Tensor]:
    """See `sandwich.normed_sum`."""
    slots = second if isinstance(second, SlotResults) else None
    rows = second.results if isinstance(second, SlotResults) else second
    x, first = x.contiguous(), first.contiguous()
    (tokens, size), count = x.shape, len(joint.following)
    out, normed = x.new_empty(x.shape), x.new_empty(count, tokens, size)
    options = overlap(x.device) if overlapping else {"OVERLAP": False}
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
