"""The small parts of a decode step in Triton: one launch where torch takes three to ten.

Each kernel has its reference in `step.py`, with the same name and arguments. Grids depend on shapes
alone and nothing waits for the device, so a call can be captured in a CUDA graph. Everything is
computed in fp32 and rounded where it is stored.

Axes: T tokens, H hidden, Hq query heads, Hkv key heads, D head size, I inner, P pages, tok tokens
of a page.
"""

from __future__ import annotations

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


_SLOTS_BLOCK = 256  # of one that adds up slots, too: few tokens


@triton.jit
def slots_sum(
    results,  # [T * k, H] fp32
    ids,  # [T, k] int64
    live,  # [1] int32, or anything if not HAS_LIVE
    token,
    experts,
    i,
    inside,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_LIVE: tl.constexpr,
):
    """Columns i of the sum of a token's slots, fp32."""
    real = True
    if HAS_LIVE:
        real = token < tl.load(live)
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(TOP_K):
        expert = tl.load(ids + token * TOP_K + slot)
        value = tl.load(results + (token * TOP_K + slot) * SIZE + i, mask=inside, other=0.0)
        total += tl.where((expert >= 0) & (expert < experts) & real, value, 0.0)
    return total


@triton.jit
def join_kernel(
    x,  # [T, H]
    routed,  # [T, H], or fp32 [T * k, H] if TOP_K
    ids,  # [T, k] int64, or anything if not TOP_K
    live,  # [1] int32, or anything if not HAS_LIVE
    shared,  # [T, H]
    share,  # [T, 1], or anything if not HAS_SHARE
    out,  # [T, H]
    share_row,
    experts,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,  # 0: routed is summed up
    HAS_LIVE: tl.constexpr,
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
    if TOP_K:
        slots = slots_sum(
            routed, ids, live, token, experts, i, inside, SIZE, BLOCK, TOP_K, HAS_LIVE
        )
        total += slots.to(out.dtype.element_ty).to(tl.float32)
    else:
        total += tl.load(routed + at, mask=inside, other=0.0).to(tl.float32)
    part = tl.load(shared + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_SHARE:
        part = part / (1.0 + tl.exp(-tl.load(share + token * share_row).to(tl.float32)))
    tl.store(out + at, (total + part).to(out.dtype.element_ty), mask=inside)


def join(x: Tensor, routed: Tensor | SlotResults, shared: Tensor, share: Tensor | None) -> Tensor:
    """See `step.join`."""
    slots = routed if isinstance(routed, SlotResults) else None
    rows = routed.results if isinstance(routed, SlotResults) else routed.contiguous()
    x, shared = x.contiguous(), shared.contiguous()
    out = x.new_empty(x.shape)
    tokens, size = x.shape
    block = _BLOCK if slots is None else _SLOTS_BLOCK
    join_kernel[(tokens, triton.cdiv(size, block))](
        x,
        rows,
        x if slots is None else slots.ids,
        x if slots is None or slots.live is None else slots.live,
        shared,
        x if share is None else share,
        out,
        0 if share is None else share.stride(0),
        0 if slots is None else slots.experts,
        SIZE=size,
        BLOCK=block,
        TOP_K=0 if slots is None else slots.ids.shape[1],
        HAS_LIVE=slots is not None and slots.live is not None,
        HAS_SHARE=share is not None,
        OVERLAP=overlap(x.device)["OVERLAP"],  # no launch_pdl: it may come where streams meet
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
    total = slots_sum(results, ids, live, token, experts, i, inside, SIZE, BLOCK, TOP_K, HAS_LIVE)
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
