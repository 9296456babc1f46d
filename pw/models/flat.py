"""A flat forward pass for plain pre-norm decoders: the same arithmetic with fewer, larger calls.

transformers spends most of a small decode step in Python. For the model types below, whose layers
are `x += attention(norm(x)); x += mlp(norm(x))`, this module runs the same weights in one loop:
projections that read the same input are one matrix product, residual sums ride on the product that
feeds them, norms take fewer calls, masks and caches are not asked for. It is used only after it
gave the general path's result on a probe; every other model keeps the general path.

Axes: T tokens, H hidden, Hq query heads, Hkv key heads, D head size, I inner, E experts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, rms_norm, silu

from pw.models.attention import AttentionBinding, AttentionContext
from pw.models.experts import expert_modules

MODEL_TYPES = ("qwen2_moe", "qwen3_moe", "mixtral")
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # of the norm
_PROBE_TOKENS = 6
_log = logging.getLogger(__name__)


class FlatDecoder:
    """The loop over the layers of one model. Make it with `flat_decoder`."""

    def __init__(self, model: Any) -> None:
        base = model.model
        self._rotary = base.rotary_emb.forward
        self._embedding: Tensor = base.embed_tokens.weight
        self._layers = [_Layer(layer) for layer in base.layers]
        self._norm = _Norm(base.norm)
        self._head: Tensor = model.lm_head.weight
        half = self._layers[0].head_dim // 2
        signs = torch.ones(2 * half, device=self._head.device, dtype=self._head.dtype)
        signs[:half] = -1  # rotate_half(x) * sin = roll(x, D/2) * (signs * sin)
        self._signs = signs

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
        cos, sin = cos.transpose(0, 1), (sin * self._signs).transpose(0, 1)  # [T, 1, D]
        for layer in self._layers:
            x = layer(x, cos, sin, context)
        return self._norm(x.index_select(0, keep))

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Skeleton.logits`."""
        return linear(hidden, self._head)


class _Norm:
    """RMS norm: one call on a GPU, five small ones on a CPU, where torch's own takes ten."""

    def __init__(self, module: Any) -> None:
        weight: Tensor = module.weight
        size, self._epsilon = weight.shape[0], float(module.variance_epsilon)
        self._weight, self._shape = weight, (size,)
        self._split = weight.device.type == "cpu" and weight.dtype == torch.float32
        if self._split:
            self._offset = weight.new_full((1, 1), self._epsilon)
            self._mean = weight.new_full((size, 1), 1 / size)

    def __call__(self, x: Tensor) -> Tensor:
        if self._split:
            return x * torch.addmm(self._offset, x * x, self._mean).rsqrt_() * self._weight
        return rms_norm(x, self._shape, self._weight, self._epsilon)


class _Layer:
    """One decoder layer on x [T, H]."""

    def __init__(self, layer: Any) -> None:
        attention = layer.self_attn
        self.head_dim = int(attention.head_dim)
        self._binding: AttentionBinding = attention.pw_attention
        self._scale = float(attention.scaling)
        self._input_norm = _Norm(layer.input_layernorm)
        self._output_norm = _Norm(layer.post_attention_layernorm)
        self._qkv = _fuse([attention.q_proj, attention.k_proj, attention.v_proj])
        self._q_heads = attention.q_proj.out_features // self.head_dim
        self._kv_heads = attention.k_proj.out_features // self.head_dim
        self._rotated = (self._q_heads + self._kv_heads) * self.head_dim
        self._head_norm = _head_norm(attention, self._q_heads, self._kv_heads)
        self._out = _Residual(attention.o_proj)
        self._mlp: _Moe | _Mlp = (
            _Moe(layer.mlp) if hasattr(layer.mlp, "experts") else _Mlp(layer.mlp)
        )

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, context: AttentionContext) -> Tensor:
        size, count = self.head_dim, x.shape[0]
        qkv = linear(self._input_norm(x), *self._qkv)
        qk = qkv[:, : self._rotated].view(count, -1, size)  # [T, Hq + Hkv, D]
        if self._head_norm is not None:
            qk = self._head_norm(qk)
        qk = torch.addcmul(qk * cos, qk.roll(size // 2, -1), sin)
        out = context.attend(
            self._binding.layer,
            qk[:, : self._q_heads],
            qk[:, self._q_heads :],
            qkv[:, self._rotated :].view(count, self._kv_heads, size),
            write=True,
            scale=self._scale,
            window=self._binding.window,
            softcap=None,
            sinks=None,
        )
        x = self._out(x, out.reshape(count, -1))
        return self._mlp(x, self._output_norm(x))


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


class _Mlp:
    """Gated MLP with its residual."""

    def __init__(self, module: Any) -> None:
        self._gate_up = _fuse([module.gate_proj, module.up_proj])
        self._activation = _activation(module.act_fn)
        self._down = _Residual(module.down_proj)

    def __call__(self, x: Tensor, normed: Tensor) -> Tensor:
        gate, up = linear(normed, *self._gate_up).chunk(2, -1)
        return self._down(x, self._activation(gate) * up)


class _Moe:
    """Routed experts, a gated shared expert where there is one, and the residual."""

    def __init__(self, block: Any) -> None:
        self._router: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]] = block.gate.forward
        self._experts = block.experts
        self._reduce = _reduction(block.experts)
        self._shared = _Shared(block) if hasattr(block, "shared_expert") else None

    def __call__(self, x: Tensor, normed: Tensor) -> Tensor:
        _, weights, ids = self._router(normed)
        experts = self._experts
        routed: Tensor = experts.pw_experts(experts.pw_slot, experts, normed, ids, weights)
        if self._reduce is not None:  # one sum over the ranks for all that is added to x
            partial = routed if self._shared is None else self._shared(routed, normed)
            return x + self._reduce(partial)
        x = x + routed
        return x if self._shared is None else self._shared(x, normed)


class _Shared:
    """`x + sigmoid(gate(y)) * mlp(y)`; its three projections of y are one product."""

    def __init__(self, block: Any) -> None:
        expert = block.shared_expert
        self._in = _fuse([expert.gate_proj, expert.up_proj, block.shared_expert_gate])
        self._sizes = [expert.gate_proj.out_features, expert.up_proj.out_features, 1]
        self._activation = _activation(expert.act_fn)
        self._down: Tensor = expert.down_proj.weight

    def __call__(self, x: Tensor, normed: Tensor) -> Tensor:
        gate, up, share = torch.split(linear(normed, *self._in), self._sizes, -1)
        out = linear(self._activation(gate) * up, self._down)
        return torch.addcmul(x, share.sigmoid(), out)


def _reduction(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """How a rank's partial result of a module is summed up; None where it is the whole."""
    return module.__dict__.get("pw_reduce")


def _head_norm(attention: Any, q_heads: int, kv_heads: int) -> Callable[[Tensor], Tensor] | None:
    """Norm of every query and key head, [T, Hq + Hkv, D] -> same; None where there is none."""
    if not hasattr(attention, "q_norm"):
        return None
    weights = [attention.q_norm.weight] * q_heads + [attention.k_norm.weight] * kv_heads
    weight = torch.stack(weights)  # [Hq + Hkv, D]
    shape, epsilon = (weight.shape[1],), float(attention.q_norm.variance_epsilon)
    return lambda qk: rms_norm(qk, shape, None, epsilon) * weight


def _activation(module: nn.Module) -> Callable[[Tensor], Tensor]:
    return silu if type(module).__name__ in ("SiLU", "SiLUActivation") else module


def _fuse(modules: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
    """One weight and bias for linear maps of the same input, whose own become views of it."""
    sizes = [module.out_features for module in modules]
    if modules[0].weight.stride(0) == 1:  # stored by column, and so shall be the whole
        weight = torch.cat([module.weight.t() for module in modules], dim=1).t()
    else:
        weight = torch.cat([module.weight for module in modules])
    for module, part in zip(modules, torch.split(weight, sizes), strict=True):
        module.weight = nn.Parameter(part, requires_grad=False)
    if modules[0].bias is None:
        return weight, None
    bias = torch.cat([module.bias for module in modules])
    for module, part in zip(modules, torch.split(bias, sizes), strict=True):
        module.bias = nn.Parameter(part, requires_grad=False)
    return weight, bias


class _ProbeContext:
    """Attention that needs no history: each query takes the mean of its token's values."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, **_: Any
    ) -> Tensor:
        """Depends on q, k, v, scale and layer, so that a mix-up of any shows."""
        groups = q.shape[1] // k.shape[1]
        keys, values = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        score = (q * keys).sum(-1, keepdim=True) * scale
        return values * (score.sigmoid() + 0.1 * layer)


def flat_decoder(
    model: Any, general: Callable[[Tensor, Tensor, AttentionContext, Tensor], Tensor]
) -> FlatDecoder | None:
    """The flat pass of a loaded skeleton's model, if its type has one and the probe agrees.

    Args:
        model: transformers' model with dense weights loaded and attention bound.
        general: The forward pass it must reproduce; see `Skeleton.forward`.
    """
    if model.config.model_type not in MODEL_TYPES:
        return None
    try:
        flat = FlatDecoder(model)
        difference = _difference(model, flat, general)
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        _log.warning("no flat forward pass for `%s`: %s", model.config.model_type, error)
        return None
    if difference > _TOLERANCE[flat._head.dtype]:
        _log.warning(
            "no flat forward pass for `%s`: it differs by %.1e", model.config.model_type, difference
        )
        return None
    return flat


@torch.inference_mode()
def _difference(
    model: Any,
    flat: FlatDecoder,
    general: Callable[[Tensor, Tensor, AttentionContext, Tensor], Tensor],
) -> float:
    """Norm of the difference of the logits of both passes over that of the logits."""
    device = flat._head.device
    ids = torch.arange(_PROBE_TOKENS, device=device) % flat._embedding.shape[0]
    positions = torch.arange(_PROBE_TOKENS, device=device) * 3
    keep = torch.arange(1, _PROBE_TOKENS, device=device)
    context: Any = _ProbeContext()
    for slot, (_, module) in enumerate(expert_modules(model)):
        module.__dict__.update(pw_slot=slot, pw_experts=_probe_experts)
    expected = general(ids, positions, context, keep).float()
    found = flat(ids, positions, context, keep).float()
    for _, module in expert_modules(model):
        del module.__dict__["pw_experts"]
    return float((found - expected).norm() / expected.norm())


def _probe_experts(slot: int, _: nn.Module, x: Tensor, __: Tensor, weights: Tensor) -> Tensor:
    """Depends on the order of nothing but x and the sum of weights: a tie may flip ids."""
    return (x.float() * weights.float().sum(-1, keepdim=True) * (0.5 + 0.1 * slot)).to(x.dtype)
