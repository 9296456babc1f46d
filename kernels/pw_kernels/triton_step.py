"""The small parts of a decode step in Triton: one launch where torch takes three to ten.

Each kernel has its reference in `step.py`, with the same name and arguments. Grids depend on shapes
alone and nothing waits for the device, so a call can be captured in a CUDA graph. Everything is
computed in fp32 and rounded where it is stored.

Axes: T tokens, H hidden, Hq query heads, Hkv key heads, D head size, I inner, P pages, tok tokens
of a page.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pw_kernels.slots import SlotResults
from pw_kernels.triton_overlap import begin, overlap

_BLOCK = 1024  # columns of a program of an elementwise kernel


@triton.jit
def rms_norm_kernel(
    x,  # [T, H]
    weight,  # [H], or anything if not HAS_WEIGHT
    out,  # [T, H]
    x_row,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One row."""
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < SIZE
    value = tl.load(x + row * x_row + i, mask=inside, other=0.0).to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    if HAS_WEIGHT:
        value = value * tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + i, value.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    """See `step.rms_norm`."""
    size = x.shape[-1]
    rows = x.reshape(-1, size)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    out = rows.new_empty(rows.shape)
    rms_norm_kernel[(rows.shape[0],)](
        rows,
        out if weight is None else weight,
        out,
        rows.stride(0),
        epsilon,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        HAS_WEIGHT=weight is not None,
        num_warps=8 if size > 1024 else 4,
        **overlap(x.device),
    )
    return out.view(x.shape)


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
    qkv,  # [T, (Hq + 2 Hkv) D]
    cos,  # [T, R]
    sin,  # [T, R]
    norm,  # [Hq + Hkv, D], or anything if not HAS_NORM
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
    HAS_NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One head of one token: normed, rotated, and put where attention finds it."""
    begin(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK)
    inside = d < SIZE
    source = qkv + token * qkv_row + head * SIZE
    value = tl.load(source + d, mask=inside, other=0.0).to(tl.float32)
    slot = tl.load(slots + token)
    if head < Q_HEADS + KV_HEADS:
        half: tl.constexpr = ROTATED // 2
        turns = d < ROTATED
        other = tl.where(d < half, d + half, d - half)
        partner = tl.load(source + other, mask=turns, other=0.0).to(tl.float32)
        if HAS_NORM:
            scale = tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
            weights = norm + head * SIZE
            value = value * scale * tl.load(weights + d, mask=inside, other=0.0).to(tl.float32)
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
) -> Tensor:
    """See `step.rotate_store`."""
    kv_heads = k_pages.shape[2]
    heads = qkv.shape[1] // head_size
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
        HAS_NORM=norm is not None,
        num_warps=1,
        **overlap(qkv.device),
    )
    return q


@triton.jit
def write_kv_kernel(
    source,  # [T, Hkv, D]
    pages,  # [P, tok, Hkv, D]
    slots,  # [T] int64
    source_token,
    source_head,
    page_stride,
    token_stride,
    head_stride,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Store one token's keys or values at its slot."""
    begin(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    head, d = i // SIZE, i % SIZE
    used = i < HEADS * SIZE
    value = tl.load(source + token * source_token + head * source_head + d, mask=used)
    target = pages + (slot // TOKENS) * page_stride + (slot % TOKENS) * token_stride
    tl.store(target + head * head_stride + d, value.to(pages.dtype.element_ty), mask=used)


def write_kv(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """As `reference.write_kv`; the last dimension of the pages must be dense."""
    slots = slots.contiguous()
    for source, pages in ((k, k_pages), (v, v_pages)):
        tokens, heads, size = source.shape
        if not tokens:
            return
        if source.stride(-1) != 1:
            source = source.contiguous()
        block = min(1024, triton.next_power_of_2(heads * size))
        write_kv_kernel[(tokens, triton.cdiv(heads * size, block))](
            source, pages, slots, source.stride(0), source.stride(1), *pages.stride()[:3],
            HEADS=heads, SIZE=size, TOKENS=pages.shape[1], BLOCK=block,
            **overlap(k.device),
        )  # fmt: skip


@triton.jit
def gate_kernel(
    gate_up,  # [T, 2I or more], gate first
    out,  # [T, I]
    row,
    INNER: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """act(gate) * up of a part of a row."""
    begin(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < INNER
    gate = tl.load(gate_up + token * row + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * row + INNER + i, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        act = gate / (1.0 + tl.exp(-gate))
    elif ACTIVATION == "gelu_tanh":
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        act = gate / (1.0 + tl.exp(-2.0 * inner))  # (1 + tanh y) / 2 = 1 / (1 + exp(-2y))
    else:
        act = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    act = act.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + token * INNER + i, (act * up).to(out.dtype.element_ty), mask=inside)


def gate(gate_up: Tensor, inner: int, activation: str) -> Tensor:
    """See `step.gate`."""
    out = gate_up.new_empty(gate_up.shape[0], inner)
    gate_kernel[(gate_up.shape[0], triton.cdiv(inner, _BLOCK))](
        gate_up, out, gate_up.stride(0), INNER=inner, BLOCK=_BLOCK, ACTIVATION=activation,
        **overlap(out.device),
    )  # fmt: skip
    return out


@triton.jit
def join_kernel(
    x,  # [T, H]
    routed,  # [T, H]
    shared,  # [T, H]
    share,  # [T, 1], or anything if not HAS_SHARE
    out,  # [T, H]
    share_row,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_SHARE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """X + routed + sigmoid(share) * shared of a part of a row."""
    begin(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < SIZE
    at = token * SIZE + i
    total = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(routed + at, mask=inside, other=0.0).to(tl.float32)
    part = tl.load(shared + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_SHARE:
        part = part / (1.0 + tl.exp(-tl.load(share + token * share_row).to(tl.float32)))
    tl.store(out + at, (total + part).to(out.dtype.element_ty), mask=inside)


def join(x: Tensor, routed: Tensor, shared: Tensor, share: Tensor | None) -> Tensor:
    """See `step.join`."""
    x, routed, shared = x.contiguous(), routed.contiguous(), shared.contiguous()
    out = x.new_empty(x.shape)
    tokens, size = x.shape
    join_kernel[(tokens, triton.cdiv(size, _BLOCK))](
        x,
        routed,
        shared,
        x if share is None else share,
        out,
        0 if share is None else share.stride(0),
        SIZE=size,
        BLOCK=_BLOCK,
        HAS_SHARE=share is not None,
        OVERLAP=False,  # it may come where streams meet
    )
    return out


@triton.jit
def add_slots_kernel(
    x,  # [T, H]
    results,  # [T * k, H] fp32
    ids,  # [T, k] int64
    live,  # [1] int32, or anything if not HAS_LIVE
    out,  # [T, H]
    experts,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_LIVE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """X + the rounded sum of a token's slots, of a part of a row."""
    begin(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < SIZE
    real = True
    if HAS_LIVE:
        real = token < tl.load(live)
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(TOP_K):
        expert = tl.load(ids + token * TOP_K + slot)
        value = tl.load(results + (token * TOP_K + slot) * SIZE + i, mask=inside, other=0.0)
        total += tl.where((expert >= 0) & (expert < experts) & real, value, 0.0)
    first = tl.load(x + token * SIZE + i, mask=inside, other=0.0).to(tl.float32)
    total = first + total.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + token * SIZE + i, total.to(out.dtype.element_ty), mask=inside)


def add_slots(x: Tensor, slots: SlotResults) -> Tensor:
    """See `step.add_slots`."""
    x = x.contiguous()
    out = x.new_empty(x.shape)
    tokens, size = x.shape
    add_slots_kernel[(tokens, triton.cdiv(size, _BLOCK))](
        x,
        slots.results,
        slots.ids,
        slots.ids if slots.live is None else slots.live,
        out,
        slots.experts,
        SIZE=size,
        BLOCK=_BLOCK,
        TOP_K=slots.ids.shape[1],
        HAS_LIVE=slots.live is not None,
        **overlap(x.device),
    )
    return out
