"""Shapes of keys, values and routing, found by running the model on `meta` before any weight.

Configs lie about head sizes (Gemma 4 has two, MLA expands its keys, some layers share another's
keys), so one forward pass without data asks the model itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from pw.errors import ModelError
from pw.models.attention import AttentionBinding, binding_of
from pw.models.experts import bind_experts

PROBE = "pw_probe"
_TOKENS = 4


@dataclass(frozen=True, slots=True)
class KvLayer:
    """Keys and values that one attention layer reads."""

    layer: int
    kv_heads: int
    k_dim: int
    v_dim: int
    window: int | None  # tokens seen, the query's own included; None = all
    source: int  # layer that computes and stores them; itself unless it shares another's

    @property
    def width(self) -> int:
        """Numbers per token, keys and values."""
        return self.kv_heads * (self.k_dim + self.v_dim)


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """Keys and values of all attention layers, by layer."""

    layers: tuple[KvLayer, ...]

    @property
    def stored(self) -> tuple[KvLayer, ...]:
        """The layers that own pages: those that share no other layer's keys."""
        return tuple(layer for layer in self.layers if layer.source == layer.layer)

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values of one token in all layers."""
        return sum(layer.width for layer in self.stored) * dtype.itemsize


@dataclass(frozen=True, slots=True)
class Probe:
    """What the forward pass without data found."""

    kv: KvGeometry
    bindings: dict[str, AttentionBinding]  # by path of the attention module
    top_k: int


@dataclass(slots=True)
class _Record:
    """Sink of the probe functions: shapes by module."""

    shapes: dict[int, tuple[int, int, int]]  # by id of module: kv heads, k dim, v dim
    bindings: dict[int, AttentionBinding]
    top_k: set[int]


def _probe_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    *,
    pw_record: _Record,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention function named `pw_probe`: note the shapes, return an empty result."""
    pw_record.shapes[id(module)] = (key.shape[1], key.shape[3], value.shape[3])
    pw_record.bindings[id(module)] = binding_of(module, options)
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


AttentionInterface.register(PROBE, _probe_attention)


def probe(model: nn.Module) -> Probe:
    """Run a `meta` model, built with attention `pw_probe` and experts `pw`, on a few tokens.

    Raises:
        ModelError: A layer keeps its state outside the attention interface (recurrent layers).
    """
    record = _Record({}, {}, set())

    def note_experts(_: int, __: nn.Module, x: Tensor, ids: Tensor, ___: Tensor) -> Tensor:
        record.top_k.add(ids.shape[-1])
        return torch.empty_like(x)

    bind_experts(model, note_experts)
    tokens = torch.zeros(1, _TOKENS, dtype=torch.long, device="meta")
    with torch.inference_mode():
        model(input_ids=tokens, position_ids=tokens, use_cache=False, pw_record=record)
    names = {id(module): name for name, module in model.named_modules()}
    layers = {}
    for module_id, (heads, k_dim, v_dim) in record.shapes.items():
        layer = int(model.get_submodule(names[module_id]).layer_idx)  # type: ignore[arg-type]
        binding = record.bindings[module_id]
        layers[layer] = KvLayer(layer, heads, k_dim, v_dim, binding.window, binding.layer)
    count = int(model.config.num_hidden_layers)  # type: ignore[union-attr, arg-type]
    silent = sorted(set(range(count)) - set(layers))
    if silent:
        raise ModelError(f"layers {silent} keep state outside attention (recurrent or convolution)")
    if len(record.top_k) != 1:
        raise ModelError(f"layers route tokens to different numbers of experts: {record.top_k}")
    bindings = {names[module_id]: binding for module_id, binding in record.bindings.items()}
    kv = KvGeometry(tuple(layers[layer] for layer in sorted(layers)))
    return Probe(kv, bindings, record.top_k.pop())
