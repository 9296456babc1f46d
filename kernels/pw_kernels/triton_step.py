"""The small parts of a decode step in Triton: one launch where torch takes three to ten.

Each kernel has its reference in `step.py`, with the same name and arguments. Grids depend on shapes
alone and nothing waits for the device, so a call can be captured in a CUDA graph. Everything is
computed in fp32 and rounded where it is stored.

Axes: T tokens, H hidden, Hq query heads, Hkv key heads, D head size, I inner, E experts,
k experts of a token, P pages, tok tokens of a page.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pw_kernels.step import Routing

_BLOCK = 1024  # columns of a program of an elementwise kernel
_ROUTE_TILE = 8192  # router weights held at a time
LOWEST = tl.constexpr(float("-inf"))


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
):
    """One row."""
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
    )
    return out.view(x.shape)


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
):
    """One head of one token: normed, rotated, and put where attention finds it."""
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
    )
    return q


@triton.jit
def _choose(
    logits,  # [PADDED] fp32 of one token
    choice_bias,  # [E], or anything if not HAS_CHOICE_BIAS
    expert_scale,  # [E], or anything if not HAS_EXPERT_SCALE
    ids,  # [k] int64
    weights,  # [k]
    scale,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    TOP_K: tl.constexpr,
    PADDED_K: tl.constexpr,
    SCORE: tl.constexpr,  # softmax, sigmoid, or none: the softmax is of the chosen
    GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    PAIRS: tl.constexpr,  # a group is worth its two best, else its best
    HAS_CHOICE_BIAS: tl.constexpr,
    HAS_EXPERT_SCALE: tl.constexpr,
    NORMALIZE: tl.constexpr,
):
    """Everything between the logits of a token and the experts that it goes to."""
    e = tl.arange(0, PADDED)
    used = e < EXPERTS
    score = logits
    if SCORE == "softmax":
        shifted = tl.where(used, logits, LOWEST)
        power = tl.exp(shifted - tl.max(shifted, 0))
        score = power / tl.sum(power, 0)
    elif SCORE == "sigmoid":
        score = 1.0 / (1.0 + tl.exp(-logits))
    choice = score
    if HAS_CHOICE_BIAS:
        choice += tl.load(choice_bias + e, mask=used, other=0.0).to(tl.float32)
    choice = tl.where(used, choice, LOWEST)
    if GROUPS > 1:
        group = e // (EXPERTS // GROUPS)
        worth = tl.full([PADDED], LOWEST, tl.float32)  # of the group of each expert
        for g in tl.static_range(GROUPS):
            own = tl.where(group == g, choice, LOWEST)
            value = tl.max(own, 0)
            if PAIRS:
                value += tl.max(tl.where(e == tl.argmax(own, 0), LOWEST, own), 0)
            worth = tl.where((group == g) & used, value, worth)
        open_ = tl.zeros([PADDED], tl.int32)
        for _ in tl.static_range(CHOSEN_GROUPS):
            best = tl.argmax(worth, 0) // (EXPERTS // GROUPS)
            open_ = tl.where(group == best, 1, open_)
            worth = tl.where(group == best, LOWEST, worth)
        choice = tl.where(open_ == 1, choice, LOWEST)
    n = tl.arange(0, PADDED_K)
    chosen = tl.zeros([PADDED_K], tl.int32)
    share = tl.full([PADDED_K], LOWEST, tl.float32)
    for i in tl.static_range(TOP_K):
        # NaN compares with nothing: keep the number of an expert that there is.
        best = tl.minimum(tl.argmax(choice, 0), EXPERTS - 1)
        chosen = tl.where(n == i, best, chosen)
        share = tl.where(n == i, tl.sum(tl.where(e == best, score, 0.0), 0), share)
        choice = tl.where(e == best, LOWEST, choice)
    taken = n < TOP_K
    if SCORE == "none":
        power = tl.exp(share - tl.max(share, 0))
        share = power / tl.sum(power, 0)
    share = tl.where(taken, share, 0.0)
    if NORMALIZE:
        share = share / tl.sum(share, 0)
    share = share * scale
    if HAS_EXPERT_SCALE:
        share = share * tl.load(expert_scale + chosen).to(tl.float32)
    tl.store(ids + n, chosen.to(tl.int64), mask=taken)
    tl.store(weights + n, share.to(weights.dtype.element_ty), mask=taken)


@triton.jit
def choose_kernel(
    logits,  # [T, E]
    choice_bias,
    expert_scale,
    ids,  # [T, k] int64
    weights,  # [T, k]
    logits_row,
    scale,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    TOP_K: tl.constexpr,
    PADDED_K: tl.constexpr,
    SCORE: tl.constexpr,
    GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    PAIRS: tl.constexpr,
    HAS_CHOICE_BIAS: tl.constexpr,
    HAS_EXPERT_SCALE: tl.constexpr,
    NORMALIZE: tl.constexpr,
):
    """Experts of one token from its logits; see `_choose`."""
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, PADDED)
    own = tl.load(logits + token * logits_row + e, mask=e < EXPERTS, other=0.0).to(tl.float32)
    _choose(
        own, choice_bias, expert_scale, ids + token * TOP_K, weights + token * TOP_K, scale,
        EXPERTS, PADDED, TOP_K, PADDED_K, SCORE, GROUPS, CHOSEN_GROUPS, PAIRS, HAS_CHOICE_BIAS,
        HAS_EXPERT_SCALE, NORMALIZE,
    )  # fmt: skip


@triton.jit
def route_kernel(
    x,  # [T, H] hidden states
    weight,  # [E, H]
    linear_bias,  # [E], or anything if not HAS_LINEAR_BIAS
    choice_bias,
    expert_scale,
    ids,  # [T, k] int64
    weights,  # [T, k]
    x_row,
    weight_row,
    weight_column,
    scale,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    TOP_K: tl.constexpr,
    PADDED_K: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SCORE: tl.constexpr,
    GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    PAIRS: tl.constexpr,
    HAS_LINEAR_BIAS: tl.constexpr,
    HAS_CHOICE_BIAS: tl.constexpr,
    HAS_EXPERT_SCALE: tl.constexpr,
    NORMALIZE: tl.constexpr,
):
    """Experts of one token from its hidden state, whose logits are fp32; see `_choose`."""
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, PADDED)
    used = e < EXPERTS
    products = tl.zeros([PADDED, BLOCK], tl.float32)
    for start in range(0, SIZE, BLOCK):
        h = start + tl.arange(0, BLOCK)
        inside = h < SIZE
        part = tl.load(x + token * x_row + h, mask=inside, other=0.0).to(tl.float32)
        tile = tl.load(
            weight + e[:, None] * weight_row + h[None, :] * weight_column,
            mask=used[:, None] & inside[None, :],
            other=0.0,
        ).to(tl.float32)
        products += tile * part[None, :]
    logits = tl.sum(products, 1)
    if HAS_LINEAR_BIAS:
        logits += tl.load(linear_bias + e, mask=used, other=0.0).to(tl.float32)
    _choose(
        logits, choice_bias, expert_scale, ids + token * TOP_K, weights + token * TOP_K, scale,
        EXPERTS, PADDED, TOP_K, PADDED_K, SCORE, GROUPS, CHOSEN_GROUPS, PAIRS, HAS_CHOICE_BIAS,
        HAS_EXPERT_SCALE, NORMALIZE,
    )  # fmt: skip


def choose(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """See `step.choose`."""
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    ids, weights = _chosen(logits, routing)
    experts = routing.weight.shape[0]
    choose_kernel[(logits.shape[0],)](
        logits,
        *_extras(routing),
        ids,
        weights,
        logits.stride(0),
        routing.scale,
        num_warps=1 if experts <= 128 else 4,
        **_constants(routing),
    )
    return ids, weights


def route(x: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """See `step.route`; logits are fp32."""
    ids, weights = _chosen(x, routing)
    constants = _constants(routing)
    size = routing.weight.shape[1]
    route_kernel[(x.shape[0],)](
        x,
        routing.weight,
        routing.weight if routing.bias is None else routing.bias,
        *_extras(routing),
        ids,
        weights,
        x.stride(0),
        *routing.weight.stride(),
        routing.scale,
        SIZE=size,
        BLOCK=min(triton.next_power_of_2(size), max(16, _ROUTE_TILE // constants["PADDED"])),
        HAS_LINEAR_BIAS=routing.bias is not None,
        num_warps=8,
        **constants,
    )
    return ids, weights


def _chosen(like: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Room for ids and weights [T, k]."""
    ids = like.new_empty((like.shape[0], routing.top_k), dtype=torch.int64)
    return ids, like.new_empty(ids.shape, dtype=routing.dtype)


def _extras(routing: Routing) -> tuple[Tensor, Tensor]:
    """Bias of the choice and scale of the experts, or anything."""
    bias, scale = routing.choice_bias, routing.expert_scale
    nothing = routing.weight
    return nothing if bias is None else bias, nothing if scale is None else scale


def _constants(routing: Routing) -> dict[str, Any]:
    """What `_choose` is compiled for."""
    experts = routing.weight.shape[0]
    return {
        "EXPERTS": experts,
        "PADDED": triton.next_power_of_2(experts),
        "TOP_K": routing.top_k,
        "PADDED_K": triton.next_power_of_2(routing.top_k),
        "SCORE": routing.score,
        "GROUPS": routing.groups,
        "CHOSEN_GROUPS": routing.chosen_groups,
        "PAIRS": routing.pairs,
        "HAS_CHOICE_BIAS": routing.choice_bias is not None,
        "HAS_EXPERT_SCALE": routing.expert_scale is not None,
        "NORMALIZE": routing.normalize,
    }


@triton.jit
def gate_kernel(
    gate_up,  # [T, 2I or more], gate first
    out,  # [T, I]
    row,
    INNER: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """act(gate) * up of a part of a row."""
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
        gate_up, out, gate_up.stride(0), INNER=inner, BLOCK=_BLOCK, ACTIVATION=activation
    )
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
):
    """X + routed + sigmoid(share) * shared of a part of a row."""
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
    )
    return out
