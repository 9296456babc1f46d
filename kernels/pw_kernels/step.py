"""The small parts of a decode step: norm, rotation and KV store, routing, gate, sum.

On a GPU each is one Triton kernel (`triton_step`, `triton_rotation`, `triton_routers`), elsewhere a
few calls of torch: the reference. The choice is made per call by the device of the tensors;
`backend` names one for tests.

Axes: T tokens, H hidden, Hq query heads, Hkv key heads, D head size, I inner, E experts,
k experts of a token, P pages, tok tokens of a page.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional

from pw_kernels import reference
from pw_kernels.slots import SlotResults

BACKENDS = ("auto", "torch", "triton")
ROUTED_TOKENS = 128  # whose fp32 router is one kernel; a matrix product serves more better


@dataclass(frozen=True, eq=False)
class Norm:
    """An RMS norm: see `rms_norm`.

    Attributes:
        weight: [K].
        epsilon: Added to the mean square.
    """

    weight: Tensor
    epsilon: float


@dataclass(frozen=True, eq=False)
class Routing:
    """How a router gets from hidden states to experts.

        logits = x W^T + bias
        score  = softmax(logits), sigmoid(logits) or logits
        ids    = the top k of score + choice_bias, within the best groups of experts
        weight = score of these; with score "none" the softmax of their logits;
                 then normalized to 1, times scale, times expert_scale, as far as there are any

    Attributes:
        weight: [E, H].
        top_k: k.
        dtype: Of the weights that come out, or what they are rounded to before.
        widened: They come out as fp32.
        score: "softmax", "sigmoid" or "none".
        normalize: Make the weights of a token sum to 1 before they are scaled.
        scale: Factor of all weights.
        bias: [E], of the logits.
        choice_bias: [E], of the choice alone.
        expert_scale: [E], factor of each expert's weight.
        groups: Equal groups of neighbouring experts; 1 = none.
        chosen_groups: Groups that experts are chosen from.
        pairs: A group is worth the sum of its two best experts, else its best.
        wide: Logits are computed in fp32, else by a matrix product in the dtype of x.
    """

    weight: Tensor
    top_k: int
    dtype: torch.dtype
    score: str = "softmax"
    normalize: bool = False
    scale: float = 1.0
    bias: Tensor | None = None
    choice_bias: Tensor | None = None
    expert_scale: Tensor | None = None
    groups: int = 1
    chosen_groups: int = 1
    pairs: bool = False
    wide: bool = False
    widened: bool = False

    def __post_init__(self) -> None:
        experts = self.weight.shape[0]
        if self.score not in ("softmax", "sigmoid", "none"):
            raise ValueError(f"score must be softmax, sigmoid or none: {self.score!r}")
        if experts % self.groups or not 1 <= self.chosen_groups <= self.groups:
            raise ValueError(f"{self.chosen_groups} of {self.groups} groups of {experts} experts")
        if not 1 <= self.top_k <= experts // self.groups * self.chosen_groups:
            raise ValueError(f"top {self.top_k} of {experts} experts in {self.groups} groups")


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, *, backend: str = "auto") -> Tensor:
    """X / rms(x) * weight over the last axis, in fp32, rounded once.

    Args:
        x: [..., H].
        weight: [H] or None.
        epsilon: Added to the mean square.
        backend: One of BACKENDS.
    """
    if (kernels := kernels_of(backend, x)) is not None:
        return kernels.rms_norm(x, weight, epsilon)  # type: ignore[no-any-return]
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide if weight is None else wide * weight.float()).to(x.dtype)


def angles(
    positions: Tensor,
    frequencies: Tensor,
    scaling: float,
    dtype: torch.dtype,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of positions * frequencies, times scaling: [T, 2F] each, both halves alike.

    Args:
        positions: [T] int64.
        frequencies: [F] fp32.
        scaling: Factor of both.
        dtype: Of the result.
        backend: One of BACKENDS.
    """
    if (kernels := kernels_of(backend, positions, "triton_rotation")) is not None:
        return kernels.angles(positions, frequencies, scaling, dtype)  # type: ignore[no-any-return]
    both = (positions[:, None].float() * frequencies.float()).repeat(1, 2)
    return (both.cos() * scaling).to(dtype), (both.sin() * scaling).to(dtype)


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
    backend: str = "auto",
) -> Tensor:
    """Rotate queries and keys, and store keys and values in their pages.

    Args:
        qkv: [T, (Hq + 2 Hkv) D] queries, keys and values of a token side by side.
        cos: [T, R] of the angles, both halves of R; heads beyond R <= D are not rotated.
        sin: [T, R].
        k_pages: [P, tok, Hkv, D], written in place.
        v_pages: [P, tok, Hkv, D], written in place.
        slots: [T] int64, page * tok + place; negative = not stored.
        head_size: D.
        norm: [Hq + Hkv, D] weights of an RMS norm of each head before it is rotated, or
            [Hq + 2 Hkv, D], with those of the values' heads; None: no norm.
        epsilon: Of the norm.
        shared_values: Values are the keys, neither normed nor rotated by then: qkv ends with these.
        backend: One of BACKENDS.

    Returns:
        Queries [T, Hq, D].
    """
    if (kernels := kernels_of(backend, qkv, "triton_rotation")) is not None:
        return kernels.rotate_store(  # type: ignore[no-any-return]
            qkv,
            cos,
            sin,
            k_pages,
            v_pages,
            slots,
            head_size=head_size,
            norm=norm,
            epsilon=epsilon,
            shared_values=shared_values,
        )
    kv_heads = k_pages.shape[2]
    heads = qkv.view(qkv.shape[0], -1, head_size)
    if shared_values:
        heads = torch.cat((heads, heads[:, -kv_heads:]), 1)
    split = heads.shape[1] - 2 * kv_heads
    if norm is not None:
        normed = heads[:, : len(norm)].float()
        normed = rms_norm(normed, None, epsilon, backend="torch") * norm.float()
        heads = torch.cat((normed, heads[:, len(norm) :].float()), 1)
    turned = heads[:, : split + kv_heads].float()
    size = cos.shape[1]
    part, rest = turned[..., :size], turned[..., size:]
    first, second = part.chunk(2, -1)
    part = part * cos.float()[:, None] + torch.cat((-second, first), -1) * sin.float()[:, None]
    turned = torch.cat((part, rest), -1).to(qkv.dtype)
    values = heads[:, split + kv_heads :].to(qkv.dtype)
    reference.write_kv(turned[:, split:], values, k_pages, v_pages, slots)
    return turned[:, :split]


def route(x: Tensor, routing: Routing, *, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """Experts of each token and their weights: ids [T, k] int64, best first, and weights [T, k].

    Args:
        x: [T, H].
        routing: What the router does.
        backend: One of BACKENDS.
    """
    if not routing.wide:
        return choose(functional.linear(x, routing.weight, routing.bias), routing, backend=backend)
    if (kernels := kernels_of(backend, x, "triton_routers")) is not None and (
        backend == "triton" or x.shape[0] <= ROUTED_TOKENS
    ):
        return kernels.route(x, routing)  # type: ignore[no-any-return]
    bias = None if routing.bias is None else routing.bias.float()
    logits = functional.linear(x.float(), routing.weight.float(), bias)
    return choose(logits, routing, backend=backend)


def choose(logits: Tensor, routing: Routing, *, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """What `route` gives, from the logits [T, E] of a router."""
    if (kernels := kernels_of(backend, logits, "triton_routers")) is not None:
        return kernels.choose(logits, routing)  # type: ignore[no-any-return]
    logits = logits.float()
    score = logits
    if routing.score == "softmax":
        score = logits.softmax(-1)
    elif routing.score == "sigmoid":
        score = logits.sigmoid()
    choice = score if routing.choice_bias is None else score + routing.choice_bias.float()
    if routing.groups > 1:
        choice = _within_groups(choice, routing)
    ids = choice.topk(routing.top_k, -1).indices
    weights = score.gather(1, ids)
    if routing.score == "none":
        weights = weights.softmax(-1)
    if routing.normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    weights = weights * routing.scale
    if routing.expert_scale is not None:
        weights = weights * routing.expert_scale.float()[ids]
    weights = weights.to(routing.dtype)
    return ids, weights.float() if routing.widened else weights


def _within_groups(choice: Tensor, routing: Routing) -> Tensor:
    """What is to be chosen from, [T, E], with -inf outside of the best groups."""
    groups = choice.view(len(choice), routing.groups, -1)
    worth = groups.topk(2, -1).values.sum(-1) if routing.pairs else groups.amax(-1)
    best = worth.topk(routing.chosen_groups, -1).indices
    closed = torch.ones_like(worth, dtype=torch.bool).scatter_(1, best, False)
    return groups.masked_fill(closed[..., None], float("-inf")).view_as(choice)


def gate(gate_up: Tensor, inner: int, activation: str, *, backend: str = "auto") -> Tensor:
    """act(gate) * up.

    Args:
        gate_up: [T, 2I or more], gate first; columns beyond 2I are not read.
        inner: I.
        activation: "silu", "gelu" or "gelu_tanh".
        backend: One of BACKENDS.

    Returns:
        [T, I].
    """
    if (kernels := kernels_of(backend, gate_up)) is not None:
        return kernels.gate(gate_up, inner, activation)  # type: ignore[no-any-return]
    first, second = gate_up[:, :inner], gate_up[:, inner : 2 * inner]
    if activation == "silu":
        return functional.silu(first) * second
    form = "tanh" if activation == "gelu_tanh" else "none"
    return functional.gelu(first, approximate=form) * second


def join(
    x: Tensor,
    routed: Tensor | SlotResults,
    shared: Tensor,
    share: Tensor | None,
    *,
    backend: str = "auto",
) -> Tensor:
    """X + routed + sigmoid(share) * shared.

    Args:
        x: [T, H].
        routed: [T, H], or what experts give before its sum.
        shared: [T, H].
        share: [T, 1] logits; None = the whole.
        backend: One of BACKENDS.
    """
    if (kernels := kernels_of(backend, x)) is not None:
        return kernels.join(x, routed, shared, share)  # type: ignore[no-any-return]
    routed = routed.sum(x.dtype) if isinstance(routed, SlotResults) else routed
    if share is None:
        return x + routed + shared
    return torch.addcmul(x + routed, share.sigmoid(), shared)


def add_slots(x: Tensor, slots: SlotResults, *, backend: str = "auto") -> Tensor:
    """X + what experts give for each token, rounded before it is added: [T, H].

    Args:
        x: [T, H].
        slots: Of T tokens.
        backend: One of BACKENDS.
    """
    if (kernels := kernels_of(backend, x)) is not None:
        return kernels.add_slots(x, slots)  # type: ignore[no-any-return]
    return x + slots.sum(x.dtype)


def kernels_of(backend: str, x: Tensor, module: str = "triton_step") -> ModuleType | None:
    """The Triton kernels of a module, where they are to be used for x; None: torch is.

    Raises:
        ValueError: No such backend, or Triton is named and not installed.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "torch" or (backend == "auto" and x.device.type != "cuda"):
        return None
    try:
        return import_module(f"pw_kernels.{module}")
    except ImportError:
        if backend == "triton":
            raise ValueError("backend 'triton' is not installed") from None
        return None
