"""Flat forward passes: the same arithmetic with fewer, larger calls.

transformers spends most of a small decode step in Python. For the model types below, this module
and `pw.models.sandwich` run the same weights in one loop: projections that read the same input are
one matrix product, residual sums ride on the product that feeds them, norms take fewer calls, masks
and caches are not asked for. On a GPU products of few rows take norms, activations and sums along
(`pw_kernels.products`), other small parts are one kernel each (`pw_kernels.step`). A flat pass is
used only after it gave the general path's result on a probe; every other model keeps the general
path (`pw.models.fusion`, `pw.models.routers`).

Here are plain pre-norm decoders, whose layers are `x += attention(norm(x)); x += mlp(norm(x))`.

Axes: T tokens, H hidden.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor
from torch.nn.functional import embedding

from pw.models.attention import AttentionContext
from pw.models.decoder import Decoder, Rotary, Turn
from pw.models.flat_attention import FlatAttention
from pw.models.flat_parts import FlatNorm, Mlp, Moe, Residual
from pw.models.probing import TOLERANCE, Forward, probe_logits, relative_difference
from pw.models.sandwich import SandwichDecoder

_log = logging.getLogger(__name__)


class FlatDecoder(Decoder):
    """See `Decoder`; of a plain pre-norm model."""

    def __init__(self, model: Any, kernels: bool | None = None) -> None:
        super().__init__(model, kernels)
        base = model.model
        self._rotary = Rotary(base.rotary_emb, self._head, self._kernels)
        self._layers = [_Layer(layer, self._kernels) for layer in base.layers]
        self._norm = FlatNorm(base.norm, self._kernels)

    def hidden(
        self,
        input_ids: Tensor,
        positions: Tensor,
        context: AttentionContext,
        keep: Tensor | None = None,
    ) -> Tensor:
        """See `Skeleton.hidden`."""
        x = embedding(input_ids, self._embedding)
        turn = self._rotary(x, positions)
        for layer in self._layers:
            x = layer(x, turn, context)
        return self._norm(x if keep is None else x.index_select(0, keep))


class _Layer:
    """One decoder layer on x [T, H]."""

    def __init__(self, layer: Any, kernels: bool) -> None:
        attention = layer.self_attn
        self._attention = FlatAttention(
            attention, FlatNorm(layer.input_layernorm, kernels), kernels
        )
        self._out = Residual(attention.o_proj, kernels)
        kind: type[Moe] | type[Mlp] = Moe if hasattr(layer.mlp, "experts") else Mlp
        self._mlp = kind(layer.mlp, FlatNorm(layer.post_attention_layernorm, kernels), kernels)

    def __call__(self, x: Tensor, turn: Turn, context: AttentionContext) -> Tensor:
        return self._mlp(self._out(x, self._attention(x, turn, context)))


DECODERS: dict[str, type[Decoder]] = {  # by model type
    "qwen2_moe": FlatDecoder,
    "qwen3_moe": FlatDecoder,
    "mixtral": FlatDecoder,
    "gemma4_text": SandwichDecoder,
}


def flat_decoder(model: Any, general: Forward) -> Decoder | None:
    """The flat pass of a loaded skeleton's model, if its type has one and the probe agrees.

    Args:
        model: transformers' model with dense weights loaded and attention bound.
        general: The forward pass it must reproduce; see `Skeleton.forward`.
    """
    kind = DECODERS.get(model.config.model_type)
    if kind is None:
        return None
    try:
        flat = kind(model)
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
