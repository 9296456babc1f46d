"""Keys and values of every sequence in arena pages. Takes pages from the pool, plans nothing.

A KV page holds keys, then values, of ONE layer for a few tokens:

    | K [tok, Hkv, Dk] | V [tok, Hkv, Dv] | slack |      tok = page_bytes // bytes of a token

Layers with equal `tok` form a group; a group takes one page per layer each time its sequences grow
by `tok` tokens. Layers that share another layer's KV store nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pw.memory.arena import Arena
from pw.memory.pool import PagePool
from pw.models.geometry import KvGeometry, KvLayer


@dataclass(frozen=True)
class LayerPages:
    """Views of the whole arena as KV pages of one layer, addressed by page id."""

    keys: Tensor  # [P, tok, Hkv, Dk]
    values: Tensor  # [P, tok, Hkv, Dv]


@dataclass
class _Group:
    """Layers with the same page geometry. `table[row, i]` = pages of layer `layers[i]`."""

    tokens_per_page: int
    layers: list[int]
    table: NDArray[np.int32]  # [rows, layers, blocks], -1 = no page


@dataclass
class KvSequence:
    """Pages of one sequence. `row` is its row in the block tables."""

    row: int
    owner: int
    pages: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)  # blocks held, per group


@dataclass(frozen=True)
class GroupBatch:
    """Where the tokens of a batch go and which pages they may read, for the layers of a group."""

    block_tables: Tensor  # [layers, B, M] int32
    slots: Tensor  # [layers, T] int64, page * tok + offset


class KvCache:
    """KV pages of up to `max_sequences` sequences.

    Attributes:
        used_pages: Pages that sequences hold.

    Args:
        geometry: KV heads and head sizes of each layer.
        dtype: Of keys and values.
        first_owner: Owner numbers from here on are sequences.
    """

    def __init__(
        self,
        geometry: KvGeometry,
        dtype: torch.dtype,
        arena: Arena,
        pool: PagePool,
        max_sequences: int,
        max_tokens: int,
        first_owner: int,
    ) -> None:
        self._arena, self._pool, self._first_owner = arena, pool, first_owner
        self._rows = list(range(max_sequences - 1, -1, -1))
        self._groups: list[_Group] = []
        self._where: dict[int, tuple[int, int]] = {}  # layer -> (group, position)
        self._views: dict[int, LayerPages] = {}
        self.sequences: dict[int, KvSequence] = {}  # by row
        self.used_pages = 0
        by_tokens: dict[int, list[KvLayer]] = {}
        for layer in geometry.stored:
            tokens = arena.page_bytes // token_bytes(layer, dtype)
            by_tokens.setdefault(tokens, []).append(layer)
        for tokens, layers in by_tokens.items():
            blocks = -(-max_tokens // tokens)
            table = np.full((max_sequences, len(layers), blocks), -1, dtype=np.int32)
            for position, layer in enumerate(layers):
                self._where[layer.layer] = (len(self._groups), position)
                self._views[layer.layer] = _views(arena, layer, dtype, tokens)
            self._groups.append(_Group(tokens, [layer.layer for layer in layers], table))

    # -- counting --------------------------------------------------------------------------

    def pages_for_tokens(self, tokens: int) -> int:
        """Pages that a sequence of this length holds over all layers."""
        return sum(len(g.layers) * -(-tokens // g.tokens_per_page) for g in self._groups)

    def pages_to_grow(self, sequence: KvSequence, tokens: int) -> int:
        """Pages that a sequence still needs to hold `tokens` tokens."""
        return sum(
            len(group.layers) * max(0, -(-tokens // group.tokens_per_page) - held)
            for group, held in zip(self._groups, sequence.blocks, strict=True)
        )

    @property
    def table_bytes(self) -> int:
        """Bytes of the block tables, and of the copy of them that a step reads."""
        return 2 * sum(group.table.nbytes for group in self._groups)

    # -- allocating ------------------------------------------------------------------------

    def open(self) -> KvSequence:
        """Start a sequence without pages. The caller keeps within `max_sequences`."""
        row = self._rows.pop()
        sequence = KvSequence(row, self._first_owner + row, blocks=[0] * len(self._groups))
        self.sequences[row] = sequence
        return sequence

    def grow(self, sequence: KvSequence, tokens: int) -> None:
        """Give a sequence the pages to hold `tokens` tokens.

        Raises:
            OutOfPagesError: Not enough pages are free; the sequence is as before.
        """
        count = self.pages_to_grow(sequence, tokens)
        if count == 0:
            return
        pages = self._pool.take(count, sequence.owner)
        sequence.pages += pages
        self.used_pages += count
        taken = 0
        for number, group in enumerate(self._groups):
            held, wanted = sequence.blocks[number], -(-tokens // group.tokens_per_page)
            if wanted <= held:
                continue
            size = (wanted - held) * len(group.layers)
            chunk = np.array(pages[taken : taken + size], dtype=np.int32)
            group.table[sequence.row, :, held:wanted] = chunk.reshape(len(group.layers), -1)
            sequence.blocks[number] = wanted
            taken += size

    def close(self, sequence: KvSequence) -> int:
        """Free all pages of a sequence.

        Returns:
            Pages freed.
        """
        freed = len(sequence.pages)
        self._pool.give_back(sequence.pages, sequence.owner)
        for group in self._groups:
            group.table[sequence.row] = -1
        del self.sequences[sequence.row]
        self.used_pages -= freed
        self._rows.append(sequence.row)
        return freed

    # -- reading and writing ---------------------------------------------------------------

    def layer_pages(self, layer: int) -> LayerPages:
        """Views of the arena for a layer that stores KV."""
        return self._views[layer]

    def place(self, layer: int) -> tuple[int, int]:
        """(group, position in the group) of a layer that stores KV."""
        return self._where[layer]

    def batch(
        self,
        rows: NDArray[np.int64],
        token_sequence: NDArray[np.int64],
        positions: NDArray[np.int64],
        longest: int,
    ) -> list[GroupBatch]:
        """Block tables and slots of a packed batch, one entry per group.

        Args:
            rows: [B] rows of the sequences.
            token_sequence: [T] index into `rows` of each token.
            positions: [T] position of each token in its sequence.
            longest: Tokens of the longest sequence after this step.
        """
        device = self._arena.pages.device
        batches = []
        for group in self._groups:
            size = group.tokens_per_page
            tables = group.table[rows, :, : -(-longest // size)].transpose(1, 0, 2)
            tables = np.ascontiguousarray(tables)
            pages = tables[:, token_sequence, positions // size]
            # NumPy lays out what it picks as it likes: kernels want the slots of a layer together.
            slots = np.ascontiguousarray(pages, dtype=np.int64) * size + positions % size
            batches.append(
                GroupBatch(torch.from_numpy(tables).to(device), torch.from_numpy(slots).to(device))
            )
        return batches

    def check_integrity(self) -> None:
        """Each sequence owns exactly the pages in its block tables.

        Raises:
            AssertionError: The books and the pool disagree.
        """
        for row, sequence in self.sequences.items():
            listed = [
                int(page)
                for number, group in enumerate(self._groups)
                for page in group.table[row, :, : sequence.blocks[number]].reshape(-1)
            ]
            if sorted(listed) != sorted(sequence.pages):
                raise AssertionError(f"sequence in row {row}: block table and page list disagree")
            if not (self._pool.owner[sequence.pages] == sequence.owner).all():
                raise AssertionError(f"sequence in row {row}: pages of another owner")
        owned = int((self._pool.owner >= self._first_owner).sum())
        listed_pages = sum(len(sequence.pages) for sequence in self.sequences.values())
        if not owned == listed_pages == self.used_pages:
            raise AssertionError(f"{owned} KV pages in the pool, {self.used_pages} in sequences")


def token_bytes(layer: KvLayer, dtype: torch.dtype) -> int:
    """Bytes of keys and values of one token in one layer."""
    return layer.width * dtype.itemsize


def _views(arena: Arena, layer: KvLayer, dtype: torch.dtype, tokens: int) -> LayerPages:
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
