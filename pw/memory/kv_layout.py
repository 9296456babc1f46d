"""How keys and values lie in pages, and how many pages a sequence needs. Keeps no books.

Layers that store as many tokens a page and see as far back form a group. A sequence takes one page
per layer of a group each time it has grown by `tokens_per_page` tokens; in a group with a window it
gives the pages back that no later token can see.

    tokens     0 ........................... computed ...... end
    full       [ page | page | page | page | page | page | pag ]
    window            freed          [ page | page | page | pag ]
                                     ^ whole units left of computed - window + 1 are free

A unit is the smallest whole number of pages in every group, at least 16 tokens: what the prefix
cache shares, and by what windows slide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pw.memory.arena import Arena
from pw.models.geometry import KvGeometry, KvLayer

LEAST_UNIT = 16  # tokens: finer sharing would cost more books than it saves


@dataclass(frozen=True)
class GroupShape:
    """Layers with the same page geometry and window."""

    tokens_per_page: int
    window: int | None  # tokens seen, the query's own included; None = all
    layers: tuple[KvLayer, ...]

    def blocks(self, tokens: int) -> int:
        """Pages of one layer that hold tokens 0..tokens-1."""
        return -(-tokens // self.tokens_per_page)


def token_bytes(layer: KvLayer, dtype: torch.dtype) -> int:
    """Bytes of keys and values of one token in one layer."""
    return layer.width * dtype.itemsize


def group_shapes(geometry: KvGeometry, dtype: torch.dtype, page_bytes: int) -> list[GroupShape]:
    """The groups of a model, in the order of their first layers."""
    groups: dict[tuple[int, int | None], list[KvLayer]] = {}
    for layer in geometry.stored:
        key = (page_bytes // token_bytes(layer, dtype), layer.window)
        groups.setdefault(key, []).append(layer)
    return [
        GroupShape(tokens, window, tuple(layers)) for (tokens, window), layers in groups.items()
    ]


def unit_tokens(groups: Sequence[GroupShape]) -> int:
    """Tokens of a unit."""
    common = math.lcm(*(group.tokens_per_page for group in groups))
    return common * -(-LEAST_UNIT // common)


def first_unit(window: int, computed: int, unit: int) -> int:
    """First unit that tokens from position `computed` on can see."""
    return max(0, computed - window + 1) // unit


def peak_blocks(group: GroupShape, tokens: int, chunk: int, unit: int) -> int:
    """Most pages of one layer held at once by a sequence that grows to a length.

    Args:
        group: The layer's group.
        tokens: Length in the end.
        chunk: Tokens of one step at most.
        unit: Tokens of a unit.
    """
    if group.window is None:
        return group.blocks(tokens)
    # From the unit of the first visible token, at worst its last, to the end of the chunk.
    seen = (unit - 1) + (group.window - 1) + chunk
    return min(group.blocks(tokens), group.blocks(seen))


def peak_pages(groups: Sequence[GroupShape], tokens: int, chunk: int) -> int:
    """Most pages held at once, over all layers, by a sequence that grows to a length."""
    unit = unit_tokens(groups)
    return sum(len(g.layers) * peak_blocks(g, tokens, chunk, unit) for g in groups)


@dataclass(frozen=True)
class GroupBatch:
    """Where the tokens of a batch go and which pages they may read, for the layers of a group."""

    block_tables: Tensor  # [layers, B, M] int32
    slots: Tensor  # [layers, T] int64, page * tok + offset


@dataclass(frozen=True)
class LayerPages:
    """Views of the whole arena as KV pages of one layer, addressed by page id."""

    keys: Tensor  # [P, tok, Hkv, Dk]
    values: Tensor  # [P, tok, Hkv, Dv]


def layer_pages(arena: Arena, layer: KvLayer, dtype: torch.dtype, tokens: int) -> LayerPages:
    """The views of a layer that stores `tokens` tokens a page."""
    flat = arena.as_dtype(dtype)
    pages, stride = flat.shape
    k_row, v_row = layer.kv_heads * layer.k_dim, layer.kv_heads * layer.v_dim
    keys = flat.as_strided(
        (pages, tokens, layer.kv_heads, layer.k_dim), (stride, k_row, layer.k_dim, 1)
    )
    values = flat.as_strided(
        (pages, tokens, layer.kv_heads, layer.v_dim),
        (stride, v_row, layer.v_dim, 1),
        tokens * k_row,
    )
    return LayerPages(keys, values)
