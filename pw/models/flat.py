"""A flat forward pass for plain pre-norm decoders: the same arithmetic with fewer, larger calls.

transformers spends most of a small decode step in Python. For the model types below, whose layers
are `x += attention(norm(x)); x += mlp(norm(x))`, this module runs the same weights in one loop:
projections that read the same input are one matrix product, residual sums ride on the product that
feeds them, norms take fewer calls, masks and caches are not asked for. On a GPU the small parts are
one kernel each (`pw_kernels.step`). It is used only after it gave the general path's result on a
probe; every other model keeps the general path (`pw.models.fusion`, `pw.models.routers`).

Axes: T tokens, H hidden, Hq query heads, Hkv key heads, D head size, I inner, E experts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, rms_norm, silu

from pw.models.attention import AttentionBinding, AttentionContext
from pw.models.experts import activation_name
from pw.models.fusion import concatenate
from pw.models.probing import TOLERANCE, Forward, probe_logits, relative_difference
from pw.models.routers import Route, fused_route
from pw_kernels import step

MODEL_TYPES = ("qwen2_moe", "qwen3_moe", "mixtral")
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
        self._rotary = base.rotary_emb.forward
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
        cos, sin = self._rotary(x, positions.unsqueeze(0))  # [1, T, D]
        turn = _Turn(cos[0], sin[0], self._signs)
        for layer in self._layers:
            x = layer(x, turn, context)
        return self._norm(x.index_select(0, keep))

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Skeleton.logits`."""
        return linear(hidden, self._head)


class _Norm:
    """RMS norm: one kernel on a GPU, five small calls on a CPU, where torch's own takes ten."""

    def __init__(self, module: Any, kernels: bool) -> None:
        weight: Tensor = module.weight
        self._kernel = kernels
        size, self._epsilon = weight.shape[0], float(module.variance_epsilon)
        self._weight = weight
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
        stores: Rotate and store keys by one kernel, where the context offers it: on a GPU. A CPU
            takes fewer calls without.
    """

    def __init__(self, layer: Any, kernels: bool) -> None:
        attention = layer.self_attn
        self.head_dim = int(attention.head_dim)
        self._binding: AttentionBinding = attention.pw_attention
        self._scale = float(attention.scaling)
        self._input_norm = _Norm(layer.input_layernorm, kernels)
        self._output_norm = _Norm(layer.post_attention_layernorm, kernels)
        self._qkv = concatenate([attention.q_proj, attention.k_proj, attention.v_proj])
        self._stores = kernels
        self._q_heads = attention.q_proj.out_features // self.head_dim
        self._kv_heads = attention.k_proj.out_features // self.head_dim
        self._outputs = (self._q_heads + 2 * self._kv_heads) * self.head_dim
        self._padded = len(self._qkv[0]) > self._outputs
        self._head_norm = (
            _HeadNorm(attention, self._q_heads, self._kv_heads)
            if hasattr(attention, "q_norm")
            else None
        )
        self._out = _Residual(attention.o_proj)
        self._mlp: _Moe | _Mlp = (
            _Moe(layer.mlp, kernels) if hasattr(layer.mlp, "experts") else _Mlp(layer.mlp, kernels)
        )

    def __call__(self, x: Tensor, turn: _Turn, context: AttentionContext) -> Tensor:
        qkv = linear(self._input_norm(x), *self._qkv)
        if self._padded:
            qkv = qkv[:, : self._outputs]
        store = getattr(context, "store_rotated", None) if self._stores else None
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
        x = self._out(x, out.reshape(len(x), -1))
        return self._mlp(x, self._output_norm(x))

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

    def __init__(self, module: Any) -> None:
        self._weight: Tensor = module.weight.t()  # a view
        self._bias: Tensor | None = module.bias
        self._reduce = _reduction(module)

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        if self._reduce is not None:
            return x + self._reduce(linear(y, self._weight.t(), self._bias))
        out = torch.addmm(x, y, self._weight)
        return out if self._bias is None else out + self._bias


class _Gated:
    """act(gate(y)) * up(y), the two projections, and others of the same input, as one product."""

    def __init__(self, module: Any, kernels: bool, *others: Any) -> None:
        self._in = concatenate([module.gate_proj, module.up_proj, *others])
        self._inner = module.gate_proj.out_features
        rest = len(self._in[0]) - 2 * self._inner  # of the others, and padding
        self._sizes = [self._inner, self._inner, *([rest] if rest else [])]
        name = activation_name(module.act_fn)
        self._kernel = name if kernels else None
        self._function: Callable[[Tensor], Tensor] = silu if name == "silu" else module.act_fn

    def __call__(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """[T, I], and what the other projections gave side by side, then padding, if any."""
        product = linear(y, *self._in)
        parts = torch.split(product, self._sizes, -1)
        if self._kernel is not None:
            return step.gate(product, self._inner, self._kernel), parts[-1]
        return self._function(parts[0]) * parts[1], parts[-1]


class _Mlp:
    """Gated MLP with its residual."""

    def __init__(self, module: Any, kernels: bool) -> None:
        self._gated = _Gated(module, kernels)
        self._down = _Residual(module.down_proj)

    def __call__(self, x: Tensor, normed: Tensor) -> Tensor:
        return self._down(x, self._gated(normed)[0])


class _Moe:
    """Routed experts, a gated shared expert where there is one, and the residual."""

    def __init__(self, block: Any, kernels: bool) -> None:
        self._router: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]] = block.gate.forward
        self._experts = block.experts
        self._reduce = _reduction(block.experts)
        self._route: Route | None = None  # the same by kernels
        if kernels:
            self._route = fused_route(block.gate, block.experts.gate_up_proj.dtype)
        self._shared: _Shared | None = None
        self._joined = False  # the router's product is part of the shared expert's
        if hasattr(block, "shared_expert"):
            self._joined = self._route is not None and self._route.joins
            self._shared = _Shared(block, kernels, self._joined)
        if self._route is not None and self._joined:
            routing = replace(self._route.routing, weight=block.gate.weight)  # now a view
            self._route = replace(self._route, routing=routing)

    def __call__(self, x: Tensor, normed: Tensor) -> Tensor:
        shared = None if self._shared is None else self._shared(normed)
        if self._route is None:
            _, weights, ids = self._router(normed)
        elif shared is not None and self._joined:
            ids, weights = self._route.choose(shared.logits)
        else:
            ids, weights = self._route(normed)
        experts = self._experts
        routed: Tensor = experts.pw_experts(experts.pw_slot, experts, normed, ids, weights)
        if shared is None:
            return x + (routed if self._reduce is None else self._reduce(routed))
        if self._reduce is not None:  # one sum over the ranks for all that is added to x
            added = torch.addcmul(routed, shared.share.sigmoid(), shared.out)
            return x + self._reduce(added)
        if self._route is None:
            return torch.addcmul(x + routed, shared.share.sigmoid(), shared.out)
        return step.join(x, routed, shared.out, shared.share)


class _SharedResult(NamedTuple):
    out: Tensor  # [T, H]
    share: Tensor  # [T, 1], before the sigmoid
    logits: Tensor  # [T, E] of the router, if its product is part of this one


class _Shared:
    """A shared expert and the gate of its share; its projections are one product.

    Args:
        block: The MoE block.
        kernels: See `FlatDecoder`.
        with_router: The product is the router's, too.
    """

    def __init__(self, block: Any, kernels: bool, with_router: bool) -> None:
        others = [block.shared_expert_gate, *([block.gate] if with_router else [])]
        self._gated = _Gated(block.shared_expert, kernels, *others)
        self._down: Tensor = block.shared_expert.down_proj.weight
        self._experts = len(block.gate.weight)

    def __call__(self, normed: Tensor) -> _SharedResult:
        gated, rest = self._gated(normed)
        logits = rest[:, 1 : 1 + self._experts]
        return _SharedResult(linear(gated, self._down), rest[:, :1], logits)


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
