"""A short forward pass of a skeleton's model whose result depends on every dense weight.

Rewrites of the model are held against it before they are used: attention and experts are replaced
by functions that need neither history nor expert weights.

Axes: T tokens, Hq query heads, Hkv key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from pw.models.attention import AttentionContext
from pw.models.experts import expert_modules
from pw_kernels.step import rotate_store

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # of the norm
_TOKENS = 6

Forward = Callable[[Tensor, Tensor, AttentionContext, Tensor], Tensor]  # see `Skeleton.forward`


class _ProbeContext:
    """Attention that needs no history: each query takes a share of its token's values.

    Args:
        kv_heads: By layer, of those that may store what they rotated.
    """

    def __init__(self, kv_heads: dict[int, int]) -> None:
        self._kv_heads = kv_heads

    def attend_rotated(
        self,
        layer: int,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        head_size: int,
        norm: Tensor | None,
        epsilon: float,
        shared_values: bool,
        scale: float,
        **_: Any,
    ) -> Tensor:
        """As `StepBatch.attend_rotated`, with a page that holds all tokens."""
        tokens, kv_heads = len(qkv), self._kv_heads[layer]
        keys = qkv.new_zeros(1, tokens, kv_heads, head_size)
        values, slots = torch.zeros_like(keys), torch.arange(tokens, device=qkv.device)
        q = rotate_store(
            qkv, cos, sin, keys, values, slots, head_size=head_size, norm=norm, epsilon=epsilon,
            shared_values=shared_values,
        )  # fmt: skip
        return self.attend(layer, q, keys[0], values[0], scale=scale)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, **_: Any
    ) -> Tensor:
        """Depends on q, k, v, scale and layer, so that a mix-up of any shows."""
        groups = q.shape[1] // k.shape[1]
        keys, values = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        score = (q * keys).sum(-1, keepdim=True) * scale
        return values * (score.sigmoid() + 0.1 * layer)


def _probe_experts(slot: int, _: nn.Module, x: Tensor, __: Tensor, weights: Tensor) -> Tensor:
    """Depends on the order of nothing but x and the sum of weights: a tie may flip ids."""
    return (x.float() * weights.float().sum(-1, keepdim=True) * (0.5 + 0.1 * slot)).to(x.dtype)


@torch.inference_mode()
def probe_logits(model: Any, *forwards: Forward) -> list[Tensor]:
    """Logits [T - 1, V] in fp32 of each forward pass, on the same tokens.

    The model's experts are bound to the probe's meanwhile, and to none after it.
    """
    embedding: Tensor = model.get_input_embeddings().weight
    device = embedding.device
    ids = torch.arange(_TOKENS, device=device) % embedding.shape[0]
    positions = torch.arange(_TOKENS, device=device) * 3
    keep = torch.arange(1, _TOKENS, device=device)
    context: Any = _ProbeContext(_kv_heads(model))
    for slot, (_, module) in enumerate(expert_modules(model)):
        module.__dict__.update(pw_slot=slot, pw_experts=_probe_experts)
    try:
        return [forward(ids, positions, context, keep).float() for forward in forwards]
    finally:
        for _, module in expert_modules(model):
            del module.__dict__["pw_experts"]


def _kv_heads(model: nn.Module) -> dict[int, int]:
    """Of the attention modules that keep heads of one size side by side, by layer."""
    return {
        module.pw_attention.layer: module.k_proj.out_features // module.head_dim
        for module in cast(Iterable[Any], model.modules())
        if "pw_attention" in module.__dict__
        and hasattr(module, "k_proj")
        and hasattr(module, "head_dim")
    }


def why_not(model: Any, expected: Tensor, forward: Forward) -> str | None:
    """Why a rewrite of a model is not to be kept; None if it gives the logits that it gave before.

    Args:
        model: Rewritten.
        expected: What `probe_logits` gave before.
        forward: Its forward pass; what it raises is a reason, too.
    """
    try:
        (found,) = probe_logits(model, forward)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        return str(error)
    difference = relative_difference(found, expected)
    if difference <= TOLERANCE[model.dtype]:
        return None
    return f"logits differ by {difference:.1e}"


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected; NaN where either has NaN."""
    return float((found - expected).norm() / expected.norm())
