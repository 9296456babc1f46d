"""Attention of the flat forward passes: from hidden states to the result of each head.

Modules of other models that compute the same are let do it, too (`fuse_attention`).

Axes: T tokens, H hidden, Hq query heads, Hkv key heads, D head size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm

from pw.models.attention import AttentionBinding, AttentionContext
from pw.models.decoder import Turn
from pw.models.flat_parts import FlatNorm
from pw.models.fusion import concatenate, epsilon_of
from pw.models.probing import Forward, probe_logits, why_not
from pw_kernels import products

_log = logging.getLogger(__name__)
_MAPS = ("q_proj", "k_proj", "o_proj")


class FlatAttention:
    """One joint product for queries, keys and values, norms of heads, rotation, attention.

    Args:
        attention: transformers' module with its binding. Without `v_proj` its values are the keys
            as they come.
        norm: Of what it is given; None: that is normed already.
        kernels: As for a GPU; keys are rotated and stored by one kernel, where the context offers
            it. A CPU takes fewer calls without.
    """

    def __init__(self, attention: Any, norm: FlatNorm | None, kernels: bool) -> None:
        self._head_dim = int(attention.head_dim)
        self._binding: AttentionBinding = attention.pw_attention
        self._scale = float(attention.scaling)
        self._norm, self._kernels = norm, kernels
        maps = [attention.q_proj, attention.k_proj]
        self._shared_values = attention.v_proj is None
        if not self._shared_values:
            maps.append(attention.v_proj)
        self._qkv = concatenate(maps)
        self._q_heads = attention.q_proj.out_features // self._head_dim
        self._kv_heads = attention.k_proj.out_features // self._head_dim
        self._sizes = [module.out_features for module in maps]
        self._outputs = sum(self._sizes)
        self._padded = len(self._qkv[0]) > self._outputs
        self._head_norm: _HeadNorm | None = None
        self._wide_norms: tuple[Any, Any] | None = None
        if _norm_size(attention) == self._head_dim:
            self._head_norm = _HeadNorm(attention, self._q_heads, self._kv_heads)
        elif _norm_size(attention):
            self._wide_norms = attention.q_norm, attention.k_norm

    def __call__(self, x: Tensor, turn: Turn, context: AttentionContext) -> Tensor:
        """[T, H] -> [T, Hq D]."""
        norm = self._norm
        if self._kernels:
            joined = None if norm is None else norm.joined
            qkv = products.product(x, *self._qkv, norm=joined)
        else:
            qkv = linear(x if norm is None else norm(x), *self._qkv)
        if self._padded:
            qkv = qkv[:, : self._outputs]
        if self._wide_norms is not None:
            first, second, *rest = torch.split(qkv, self._sizes, -1)
            qkv = torch.cat((self._wide_norms[0](first), self._wide_norms[1](second), *rest), -1)
        binding, heads = self._binding, self._head_norm
        options: dict[str, Any] = {
            "scale": self._scale,
            "window": binding.window,
            "softcap": binding.softcap,
        }
        rotated = getattr(context, "attend_rotated", None) if self._kernels else None
        out: Tensor
        if rotated is not None:
            out = rotated(
                binding.layer,
                qkv,
                turn.cos,
                turn.sin,
                head_size=self._head_dim,
                norm=None if heads is None else heads.weight,
                epsilon=0.0 if heads is None else heads.epsilon,
                shared_values=self._shared_values,
                **options,
            )
        else:
            qkv_heads = self._rotate(qkv, turn)
            out = context.attend(binding.layer, *qkv_heads, write=True, sinks=None, **options)
        return out.reshape(len(x), -1)

    def _rotate(self, qkv: Tensor, turn: Turn) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, Hq, D], keys and values [T, Hkv, D] of a joint product."""
        heads = qkv.view(len(qkv), -1, self._head_dim)
        split = self._q_heads + self._kv_heads
        qk, v = heads[:, :split], heads[:, -self._kv_heads :]
        if self._head_norm is not None:
            qk, v = self._head_norm(qk, v)
        qk = turn(qk)
        return qk[:, : self._q_heads], qk[:, self._q_heads :], v


class _HeadNorm:
    """Norm of every query and key head, and of every value head where there is one.

    Attributes:
        weight: [Hq + Hkv, D], or [Hq + 2 Hkv, D].
        epsilon: Added to the mean square.
    """

    def __init__(self, attention: Any, q_heads: int, kv_heads: int) -> None:
        weights = [attention.q_norm.weight] * q_heads + [attention.k_norm.weight] * kv_heads
        self._heads = len(weights)
        self._values = hasattr(attention, "v_norm")
        if self._values:
            own = getattr(attention.v_norm, "weight", None)
            weights += [torch.ones_like(weights[0]) if own is None else own] * kv_heads
        self.weight = torch.stack(weights)
        self.epsilon = epsilon_of(attention.q_norm)

    def __call__(self, qk: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """[T, Hq + Hkv, D] and values [T, Hkv, D] -> same."""
        qk = self._normed(qk) * self.weight[: self._heads]
        return qk, self._normed(v) * self.weight[self._heads :] if self._values else v

    def _normed(self, heads: Tensor) -> Tensor:
        return rms_norm(heads, heads.shape[-1:], None, self.epsilon)


class _Replacement:
    """The forward pass of an attention module; its output map stays what it is."""

    def __init__(self, module: Any, kernels: bool) -> None:
        self._attention = FlatAttention(module, None, kernels)
        self._out: Callable[[Tensor], Tensor] = module.o_proj

    def __call__(
        self,
        hidden_states: Tensor,  # [1, T, H]
        position_embeddings: tuple[Tensor, Tensor],  # cosines and sines [1, T, R]
        attention_mask: Tensor | None = None,
        *,
        pw_context: AttentionContext,
        **_: Any,
    ) -> tuple[Tensor, None]:
        cos, sin = position_embeddings
        heads = self._attention(hidden_states[0], Turn(cos[0], sin[0]), pw_context)
        return self._out(heads.unsqueeze(0)), None


def fuse_attention(model: Any, forward: Forward, *, kernels: bool = True) -> int:
    """Let attention modules of the usual kind norm, rotate and store in one launch; how many.

    All or none are replaced, as the model gives the same logits or does not.

    Args:
        model: transformers' model with dense weights, whole or a rank's part, and attention bound.
        forward: Its forward pass through transformers' own code.
        kernels: As for a GPU.
    """
    bound = [module for module in model.modules() if "pw_attention" in module.__dict__]
    found = [module for module in bound if _is_usual(module)]
    if not found or not all(module.pw_attention.write for module in bound):
        return 0  # keys that layers share are handed on by transformers' code

    def replaced(*arguments: Any) -> Tensor:
        for module in found:
            module.__dict__["forward"] = _Replacement(module, kernels)
        return forward(*arguments)

    (before,) = probe_logits(model, forward)
    if (cause := why_not(model, before, replaced)) is not None:
        for module in found:
            module.__dict__.pop("forward", None)
        _log.warning("attention of `%s` keeps its own code: %s", model.config.model_type, cause)
        return 0
    return len(found)


def _is_usual(module: Any) -> bool:
    """Whether an attention module looks as if it were; with sinks or bounds it is not."""
    if any(type(getattr(module, name, None)) is not nn.Linear for name in _MAPS):
        return False
    if type(getattr(module, "v_proj", module)) not in (nn.Linear, type(None)):
        return False
    bounds = getattr(module.config, "clip_qkv", None)  # no probe may reach them
    return bounds is None and not hasattr(module, "sinks")


def _norm_size(attention: Any) -> int:
    """Numbers that the norm of queries goes over: a head, or all of them; 0: there is none."""
    return len(attention.q_norm.weight) if hasattr(attention, "q_norm") else 0
