"""Routers in Triton: from hidden states or logits to the experts of each token, one launch.

The reference is in `step.py`, with the same names and arguments. Grids depend on shapes alone and
nothing waits for the device. Everything is computed in fp32 and rounded where it is stored.

Axes: T tokens, H hidden, E experts, k experts of a token.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pw_kernels.step import Routing
from pw_kernels.triton_overlap import begin, overlap

_TILE = 8192  # router weights held at a time
_TYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
LOWEST = tl.constexpr(float("-inf"))


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
    DTYPE: tl.constexpr,  # what weights are rounded to
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
    tl.store(weights + n, share.to(DTYPE).to(weights.dtype.element_ty), mask=taken)


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
    DTYPE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Experts of one token from its logits; see `_choose`."""
    begin(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, PADDED)
    own = tl.load(logits + token * logits_row + e, mask=e < EXPERTS, other=0.0).to(tl.float32)
    _choose(
        own, choice_bias, expert_scale, ids + token * TOP_K, weights + token * TOP_K, scale,
        EXPERTS, PADDED, TOP_K, PADDED_K, SCORE, GROUPS, CHOSEN_GROUPS, PAIRS, HAS_CHOICE_BIAS,
        HAS_EXPERT_SCALE, NORMALIZE, DTYPE,
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
    DTYPE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Experts of one token from its hidden state, whose logits are fp32; see `_choose`."""
    begin(OVERLAP)
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
        HAS_EXPERT_SCALE, NORMALIZE, DTYPE,
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
        **overlap(logits.device),
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
        BLOCK=min(triton.next_power_of_2(size), max(16, _TILE // constants["PADDED"])),
        HAS_LINEAR_BIAS=routing.bias is not None,
        num_warps=8,
        **constants,
        **overlap(x.device),
    )
    return ids, weights


def _chosen(like: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Room for ids and weights [T, k]."""
    ids = like.new_empty((like.shape[0], routing.top_k), dtype=torch.int64)
    dtype = torch.float32 if routing.widened else routing.dtype
    return ids, like.new_empty(ids.shape, dtype=dtype)


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
        "DTYPE": _TYPES[routing.dtype],
    }
