"""A flat forward pass for plain pre-norm decoders: the same arithmetic with fewer, larger calls.

transformers spends most of a small decode step in Python. For the model types below, whose layers
are `x += attention(norm(x)); x += mlp(norm(x))`, this module runs the same weights in one loop:
projections that read the same input are one matrix product, residual sums ride on the product that
feeds them, norms take fewer calls, masks and caches are not asked for. On a GPU products of few
rows take norms, activations and sums along (`pw_kernels.products`), other small parts are one
kernel each (`pw_kernels.step`). It is used only after it gave the general path's result on a probe;
every other model keeps the general path (`pw.models.fusion`, `pw.models.routers`).

Axes: T tokens, H hidden, Hq query heads, Hkv key heads, D head size, I inner, E experts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, rms_norm, silu

from pw.models.attention import AttentionBinding, AttentionContext
from pw.models.experts import activation_name
from pw.models.fusion import concatenate
from pw.models.probing import TOLERANCE, Forward, probe_logits, relative_difference
from pw.models.routers import Route, fused_route
from pw_kernels import products, step
from pw_kernels.products import Gated, Norm

MODEL_TYPES = ("qwen2_moe", "qwen3_moe", "mixtral")
_FIXED_ROTATIONS = ("default", "linear", "llama3", "yarn")
_log = logging.getLogger(__name__)


class FlatDecoder:
    """The loop over the layers of one model. Make it with `flat_decoder`.

    Args:
        model: transformers' model with dense weights loaded and attention bound.
        kernels: Small parts by `pw_kernels.step`; None: where they are kernels, on a GPU.
    """

    def __init__(self, model: Any, kernels: bool | None = None) -> None:
        base = model.model
        if kernels is None:
            kernels = model.lm_head.weight.device.type == "cuda"
        self._rotary = _Rotary(base.rotary_emb, kernels)
        self._embedding: Tensor = base.embed_tokens.weight
        self._layers = [_Layer(layer, kernels) for layer in base.layers]
        self._norm = _Norm(base.norm, kernels)
        self._head: Tensor = model.lm_head.weight
        half = self._layers[0].head_dim // 2
        signs = torch.ones(2 * half, device=self._head.device, dtype=self._head.dtype)
        signs[:half] = -1  # rotate_half(x) * sin = roll(x, D/2) * (signs * sin)
        self._signs = signs

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        return self._head.dtype

    def __call__(
        self, input_ids: Tensor, positions: Tensor, context: AttentionContext, keep: Tensor
    ) -> Tensor:
        """See `Skeleton.forward`."""
        return self.logits(self.hidden(input_ids, positions, context, keep))

    def hidden(
        self, input_ids: Tensor, positions: Tensor, context: AttentionContext, keep: Tensor
    ) -> Tensor:
        """See `Skeleton.hidden`."""
        x = embedding(input_ids, self._embedding)
        turn = _Turn(*self._rotary(x, positions), self._signs)
        for layer in self._layers:
            x = layer(x, turn, context)
        return self._norm(x.index_select(0, keep))

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Skeleton.logits`."""
        return products.product(hidden, self._head)


class _Norm:
    """RMS norm: one kernel on a GPU, five small calls on a CPU, where torch's own takes ten.

    Attributes:
        joined: What a product needs that takes it along.
    """

    def __init__(self, module: Any, kernels: bool) -> None:
        weight: Tensor = module.weight
        self._kernel = kernels
        size, self._epsilon = weight.shape[0], float(module.variance_epsilon)
        self._weight = weight
        self.joined = Norm(weight, self._epsilon)
        on_cpu = weight.device.type == "cpu"
        self._split = not kernels and on_cpu and weight.dtype == torch.float32
        if self._split:
            self._offset = weight.new_full((1, 1), self._epsilon)
            self._mean = weight.new_full((size, 1), 1 / size)

    def __call__(self, x: Tensor) -> Tensor:
        if self._split:
            return x * torch.addmm(self._offset, x * x, self._mean).rsqrt_() * self._weight
        if self._kernel:
            return step.rms_norm(x, self._weight, self._epsilon)
        return rms_norm(x, self._weight.shape, self._weight, self._epsilon)


class _Rotary:
    """Cosines and sines [T, D] of positions: on a GPU one kernel, if frequencies never change."""

    def __init__(self, module: Any, kernels: bool) -> None:
        self._module = module
        self._kernel = kernels and getattr(module, "rope_type", None) in _FIXED_ROTATIONS

    def __call__(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        if self._kernel:
            scaling = float(self._module.attention_scaling)
            return step.angles(positions, self._module.inv_freq, scaling, x.dtype)
        cos, sin = self._module.forward(x, positions.unsqueeze(0))
        return cos[0], sin[0]


class _Turn:
    """The angles of a step's tokens.

    Attributes:
        cos: [T, D].
        sin: [T, D].
    """

    def __init__(self, cos: Tensor, sin: Tensor, signs: Tensor) -> None:
        self.cos, self.sin, self._signs = cos, sin, signs
        self._factors: tuple[Tensor, Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Heads [T, n, D], turned: rotate_half(x) * sin = roll(x, D/2) * (signs * sin)."""
        if self._factors is None:
            self._factors = (self.cos[:, None], (self.sin * self._signs)[:, None])
        cos, sin = self._factors
        return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class _Layer:
    """One decoder layer on x [T, H].

    Attributes:
        kernels: As for a GPU; keys are rotated and stored by one kernel, where the context offers
            it. A CPU takes fewer calls without.
    """

    def __init__(self, layer: Any, kernels: bool) -> None:
        attention = layer.self_attn
        self.head_dim = int(attention.head_dim)
        self._binding: AttentionBinding = attention.pw_attention
        self._scale = float(attention.scaling)
        self._input_norm = _Norm(layer.input_layernorm, kernels)
        output_norm = _Norm(layer.post_attention_layernorm, kernels)
        self._qkv = concatenate([attention.q_proj, attention.k_proj, attention.v_proj])
        self._kernels = kernels
        self._q_heads = attention.q_proj.out_features // self.head_dim
        self._kv_heads = attention.k_proj.out_features // self.head_dim
        self._outputs = (self._q_heads + 2 * self._kv_heads) * self.head_dim
        self._padded = len(self._qkv[0]) > self._outputs
        self._head_norm = (
            _HeadNorm(attention, self._q_heads, self._kv_heads)
            if hasattr(attention, "q_norm")
            else None
        )
        self._out = _Residual(attention.o_proj, kernels)
        kind: type[_Moe] | type[_Mlp] = _Moe if hasattr(layer.mlp, "experts") else _Mlp
        self._mlp = kind(layer.mlp, output_norm, kernels)

    def __call__(self, x: Tensor, turn: _Turn, context: AttentionContext) -> Tensor:
        if self._kernels:
            qkv = products.product(x, *self._qkv, norm=self._input_norm.joined)
        else:
            qkv = linear(self._input_norm(x), *self._qkv)
        if self._padded:
            qkv = qkv[:, : self._outputs]
        store = getattr(context, "store_rotated", None) if self._kernels else None
        if store is None:
            q, k, v = self._rotate(qkv, turn)
        else:
            norm = self._head_norm
            q = k = v = store(  # keys and values are in their pages already
                self._binding.layer,
                qkv,
                turn.cos,
                turn.sin,
                head_size=self.head_dim,
                norm=None if norm is None else norm.weight,
                epsilon=0.0 if norm is None else norm.epsilon,
            )
        out = context.attend(
            self._binding.layer,
            q,
            k,
            v,
            write=store is None,
            scale=self._scale,
            window=self._binding.window,
            softcap=None,
            sinks=None,
        )
        return self._mlp(self._out(x, out.reshape(len(x), -1)))

    def _rotate(self, qkv: Tensor, turn: _Turn) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, Hq, D], keys and values [T, Hkv, D] of a joint product."""
        heads = qkv.view(len(qkv), -1, self.head_dim)
        split = self._q_heads + self._kv_heads
        qk = heads[:, :split]
        if self._head_norm is not None:
            qk = self._head_norm(qk)
        qk = turn(qk)
        return qk[:, : self._q_heads], qk[:, self._q_heads :], heads[:, split:]


class _Residual:
    """`x + linear(y)` in one call; where the product is a rank's part, it is summed up first."""

    def __init__(self, module: Any, kernels: bool) -> None:
        self._weight: Tensor = module.weight
        self._bias: Tensor | None = module.bias
        self._reduce = _reduction(module)
        self._kernels = kernels

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        if self._reduce is not None:
            return x + self._reduce(linear(y, self._weight, self._bias))
        if self._kernels:
            return products.product(y, self._weight, self._bias, add=(x,))
        out = torch.addmm(x, y, self._weight.t())
        return out if self._bias is None else out + self._bias


class _Gated:
    """act(gate(y)) * up(y) of y = norm(x): the two projections, and others of y, as one product."""

    def __init__(self, module: Any, norm: _Norm, kernels: bool, *others: Any) -> None:
        self._in = concatenate([module.gate_proj, module.up_proj, *others])
        self._norm = norm
        self._inner = module.gate_proj.out_features
        rest = len(self._in[0]) - 2 * self._inner  # of the others, and padding
        self._sizes = [self._inner, self._inner, rest]
        name = activation_name(module.act_fn)
        self._kernel = name if kernels else None
        self._function: Callable[[Tensor], Tensor] = silu if name == "silu" else module.act_fn

    def __call__(self, x: Tensor) -> Gated:
        """What the others gave side by side, then padding, is `rest`."""
        weight, bias = self._in
        if self._kernel is not None:
            return products.gated_product(
                x, weight, self._inner, self._kernel, bias, norm=self._norm.joined
            )
        y = self._norm(x)
        gate, up, rest = torch.split(linear(y, weight, bias), self._sizes, -1)
        return Gated(self._function(gate) * up, rest, y)


class _Mlp:
    """Gated MLP with its residual."""

    def __init__(self, module: Any, norm: _Norm, kernels: bool) -> None:
        self._gated = _Gated(module, norm, kernels)
        self._down = _Residual(module.down_proj, kernels)

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(x, self._gated(x).out)


class _Moe:
    """Routed experts, a gated shared expert where there is one, and the residual."""

    def __init__(self, block: Any, norm: _Norm, kernels: bool) -> None:
        self._router: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]] = block.gate.forward
        self._experts = block.experts
        self._norm, self._kernels = norm, kernels
        self._reduce = _reduction(block.experts)
        route = fused_route(block.gate, block.experts.gate_up_proj.dtype) if kernels else None
        self._joined = route is not None and route.joins  # the router's product is part of another
        self._gated: _Gated | None = None
        if hasattr(block, "shared_expert"):
            others = [block.shared_expert_gate, *([block.gate] if self._joined else [])]
            self._gated = _Gated(block.shared_expert, norm, kernels, *others)
            self._down: Tensor = block.shared_expert.down_proj.weight
        if route is not None:  # the weight may be a view by now; experts want fp32
            routing = replace(route.routing, weight=block.gate.weight, widened=True)
            route = replace(route, routing=routing)
        self._route: Route | None = route

    def __call__(self, x: Tensor) -> Tensor:
        if self._gated is None:
            normed, ids, weights = self._choose(x)
            routed = self._routed(normed, ids, weights)
            return x + (routed if self._reduce is None else self._reduce(routed))
        shared = self._gated(x)
        share = shared.rest[:, :1]
        if self._route is not None and self._joined:
            logits = shared.rest[:, 1 : 1 + len(self._route.routing.weight)]
            routed = self._routed(shared.normed, *self._route.choose(logits))
        else:
            routed = self._routed(shared.normed, *self._by_router(shared.normed))
        if self._reduce is not None:  # one sum over the ranks for all that is added to x
            added = torch.addcmul(routed, share.sigmoid(), linear(shared.out, self._down))
            return x + self._reduce(added)
        if self._kernels:
            return products.product(shared.out, self._down, add=(x, routed), share=share)
        return torch.addcmul(x + routed, share.sigmoid(), linear(shared.out, self._down))

    def _choose(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The norm of x, and experts and weights of its tokens."""
        if self._route is None or not self._joined:
            normed = self._norm(x)
            return (normed, *self._by_router(normed))
        _, logits, normed = products.gated_product(
            x, self._route.routing.weight, 0, "silu", norm=self._norm.joined
        )
        return (normed, *self._route.choose(logits))

    def _by_router(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        if self._route is not None:
            return self._route(normed)
        _, weights, ids = self._router(normed)
        return ids, weights

    def _routed(self, normed: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        experts = self._experts
        result: Tensor = experts.pw_experts(experts.pw_slot, experts, normed, ids, weights)
        return result


def _reduction(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """How a rank's partial result of a module is summed up; None where it is the whole."""
    return module.__dict__.get("pw_reduce")


class _HeadNorm:
    """Norm of every query and key head.

    Attributes:
        weight: [Hq + Hkv, D].
        epsilon: Added to the mean square.
    """

    def __init__(self, attention: Any, q_heads: int, kv_heads: int) -> None:
        weights = [attention.q_norm.weight] * q_heads + [attention.k_norm.weight] * kv_heads
        self.weight = torch.stack(weights)
        self.epsilon = float(attention.q_norm.variance_epsilon)

    def __call__(self, qk: Tensor) -> Tensor:
        """[T, Hq + Hkv, D] -> same."""
        return rms_norm(qk, (self.weight.shape[1],), None, self.epsilon) * self.weight


def flat_decoder(model: Any, general: Forward) -> FlatDecoder | None:
    """The flat pass of a loaded skeleton's model, if its type has one and the probe agrees.

    Args:
        model: transformers' model with dense weights loaded and attention bound.
        general: The forward pass it must reproduce; see `Skeleton.forward`.
    """
    if model.config.model_type not in MODEL_TYPES:
        return None
    try:
        flat = FlatDecoder(model)
        expected, found = probe_logits(model, general, flat)
        difference = relative_difference(found, expected)
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        _log.warning("no flat forward pass for `%s`: %s", model.config.model_type, error)
        return None
    if not difference <= TOLERANCE[flat.dtype]:
        _log.warning(
            "no flat forward pass for `%s`: it differs by %.1e", model.config.model_type, difference
        )
        return None
    return flat
