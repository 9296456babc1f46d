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
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm

from pw.models.attention import AttentionBinding, AttentionContext
from pw.models.flat_parts import FlatNorm, Mlp, Moe, Residual
from pw.models.fusion import concatenate
from pw.models.probing import TOLERANCE, Forward, probe_logits, relative_difference
from pw_kernels import products, step

_FIXED_ROTATIONS = ("default", "linear", "llama3", "yarn")
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
        self._rotary = _Rotary(base.rotary_emb, kernels)
        self._embedding: Tensor = base.embed_tokens.weight
        self._layers = [_Layer(layer, kernels) for layer in base.layers]
        self._norm = FlatNorm(base.norm, kernels)
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
        self,
        input_ids: Tensor,
        positions: Tensor,
        context: AttentionContext,
        keep: Tensor | None = None,
    ) -> Tensor:
        """See `Skeleton.hidden`."""
        x = embedding(input_ids, self._embedding)
        turn = _Turn(*self._rotary(x, positions), self._signs)
        for layer in self._layers:
            x = layer(x, turn, context)
        return self._norm(x if keep is None else x.index_select(0, keep))

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Skeleton.logits`."""
        return products.product(hidden, self._head)


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
        self._input_norm = FlatNorm(layer.input_layernorm, kernels)
        output_norm = FlatNorm(layer.post_attention_layernorm, kernels)
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
        self._out = Residual(attention.o_proj, kernels)
        kind: type[Moe] | type[Mlp] = Moe if hasattr(layer.mlp, "experts") else Mlp
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
