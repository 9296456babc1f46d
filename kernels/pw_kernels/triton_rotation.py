"""Angles, and rotation with the store of keys and values, in Triton: one launch each.

The references are in `step.py`, with the same names and arguments. Grids depend on shapes alone and
nothing waits for the device. Everything is computed in fp32 and rounded where it is stored.

Axes: T tokens, Hq query heads, Hkv key heads, D head size, P pages, tok tokens of a page.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pw_kernels.triton_overlap import begin, overlap


@triton.jit
def angles_kernel(
    positions,  # [T] int64
    frequencies,  # [F] fp32
    out,  # [2, T, 2F]
    scaling,
    tokens,
    FREQUENCIES: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Cosines and sines of one token."""
    begin(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    f = tl.arange(0, BLOCK)
    inside = f < FREQUENCIES
    angle = tl.load(positions + token).to(tl.float32) * tl.load(frequencies + f, mask=inside)
    cos, sin = tl.cos(angle) * scaling, tl.sin(angle) * scaling
    at = out + token * 2 * FREQUENCIES + f
    for half in tl.static_range(2):
        tl.store(at + half * FREQUENCIES, cos.to(out.dtype.element_ty), mask=inside)
        target = at + (tokens * 2 + half) * FREQUENCIES
        tl.store(target, sin.to(out.dtype.element_ty), mask=inside)


def angles(
    positions: Tensor, frequencies: Tensor, scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See `step.angles`."""
    tokens, count = len(positions), len(frequencies)
    out = frequencies.new_empty((2, tokens, 2 * count), dtype=dtype)
    angles_kernel[(tokens,)](
        positions, frequencies.float().contiguous(), out, scaling, tokens,
        FREQUENCIES=count, BLOCK=triton.next_power_of_2(count), num_warps=1,
        **overlap(positions.device),
    )  # fmt: skip
    return out[0], out[1]


@triton.jit
def rotate_store_kernel(
    qkv,  # [T, (Hq + 2 Hkv) D], or [T, (Hq + Hkv) D] if SHARED
    cos,  # [T, R]
    sin,  # [T, R]
    norm,  # [NORMED, D], or anything if it is 0
    q_out,  # [T, Hq, D]
    k_pages,  # [P, tok, Hkv, D]
    v_pages,  # [P, tok, Hkv, D]
    slots,  # [T] int64, negative = not stored
    qkv_row,
    angle_row,
    k_page,
    k_token,
    k_head,
    v_page,
    v_token,
    v_head,
    eps,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    ROTATED: tl.constexpr,  # R: leading dimensions of a head that are rotated
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    NORMED: tl.constexpr,  # heads, from the first query's on
    SHARED: tl.constexpr,  # values are the keys, as they come
    OVERLAP: tl.constexpr,
):
    """One head of one token: normed, rotated, and put where attention finds it."""
    begin(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK)
    inside = d < SIZE
    place_in_row = head
    if SHARED:
        place_in_row = tl.where(head < Q_HEADS + KV_HEADS, head, head - KV_HEADS)
    source = qkv + token * qkv_row + place_in_row * SIZE
    value = tl.load(source + d, mask=inside, other=0.0).to(tl.float32)
    slot = tl.load(slots + token)
    scale = tl.full([], 1.0, tl.float32)
    weights = norm + head * SIZE
    if head < NORMED:
        scale = tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
        value = value * scale * tl.load(weights + d, mask=inside, other=0.0).to(tl.float32)
    if head < Q_HEADS + KV_HEADS:
        half: tl.constexpr = ROTATED // 2
        turns = d < ROTATED
        other = tl.where(d < half, d + half, d - half)
        partner = tl.load(source + other, mask=turns, other=0.0).to(tl.float32)
        if NORMED:
            partner = partner * scale
            partner = partner * tl.load(weights + other, mask=turns, other=0.0).to(tl.float32)
        angle = token * angle_row + d
        c = tl.load(cos + angle, mask=turns, other=1.0).to(tl.float32)
        s = tl.load(sin + angle, mask=turns, other=0.0).to(tl.float32)
        value = value * c + tl.where(d < half, -partner, partner) * s
    if head < Q_HEADS:
        target = q_out + (token * Q_HEADS + head) * SIZE + d
        tl.store(target, value.to(q_out.dtype.element_ty), mask=inside)
    elif slot >= 0:
        page, place = slot // TOKENS, slot % TOKENS
        if head < Q_HEADS + KV_HEADS:
            at = page * k_page + place * k_token + (head - Q_HEADS) * k_head
            tl.store(k_pages + at + d, value.to(k_pages.dtype.element_ty), mask=inside)
        else:
            at = page * v_page + place * v_token + (head - Q_HEADS - KV_HEADS) * v_head
            tl.store(v_pages + at + d, value.to(v_pages.dtype.element_ty), mask=inside)


def rotate_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    *,
    head_size: int,
    norm: Tensor | None = None,
    epsilon: float = 0.0,
    shared_values: bool = False,
) -> Tensor:
    """See `step.rotate_store`."""
    kv_heads = k_pages.shape[2]
    heads = qkv.shape[1] // head_size + kv_heads * shared_values
    q = qkv.new_empty(qkv.shape[0], heads - 2 * kv_heads, head_size)
    rotate_store_kernel[(qkv.shape[0], heads)](
        qkv,
        cos,
        sin,
        q if norm is None else norm,
        q,
        k_pages,
        v_pages,
        slots,
        qkv.stride(0),
        cos.stride(0),
        *k_pages.stride()[:3],
        *v_pages.stride()[:3],
        epsilon,
        Q_HEADS=q.shape[1],
        KV_HEADS=kv_heads,
        SIZE=head_size,
        ROTATED=cos.shape[1],
        TOKENS=k_pages.shape[1],
        BLOCK=triton.next_power_of_2(head_size),
        NORMED=0 if norm is None else len(norm),
        SHARED=shared_values,
        num_warps=1,
        **overlap(qkv.device),
    )
    return q
