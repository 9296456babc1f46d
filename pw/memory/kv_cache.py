"""Keys and values of every sequence in arena pages. Takes pages from the pool, plans nothing.

A KV page holds keys, then values, of ONE layer for a few tokens:

    | K [tok, Hkv, Dk] | V [tok, Hkv, Dv] | slack |      tok = page_bytes // bytes of a token

Which layers form a group, and what a unit is: `pw.memory.kv_layout`. Layers that share another
layer's KV store nothing. Pages of a sequence are its own until a unit is full and entered into the
prefix cache; from then on they are shared, and still in its block table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from pw.memory.arena import Arena
from pw.memory.kv_layout import (
    GroupBatch,
    GroupShape,
    LayerPages,
    first_unit,
    group_shapes,
    layer_pages,
    peak_blocks,
    peak_pages,
    unit_tokens,
)
from pw.memory.pool import PagePool
from pw.memory.prefix_cache import (
    Part,
    PrecisionTag,
    PrefixCache,
    PrefixChain,
    PrefixEntry,
    PrefixMatch,
)
from pw.memory.small_copies import to_device
from pw.models.geometry import KvGeometry
from pw_kernels.dispatch import attention_counters


@dataclass
class _Group:
    """Layers with the same page geometry. `table[row, i]` = pages of layer `shape.layers[i]`."""

    shape: GroupShape
    unit_blocks: int  # pages of one layer in a unit
    table: NDArray[np.int32]  # [rows, layers, blocks], -1 = no page

    def pages(self, row: int, first: int, end: int) -> list[int]:
        """Pages of blocks first..end-1 of a sequence, layer by layer."""
        pages: list[int] = self.table[row, :, first:end].reshape(-1).tolist()
        return pages


@dataclass
class KvSequence:
    """What one sequence holds. `row` is its row in the block tables."""

    row: int
    owner: int
    blocks: list[int]  # end of the blocks held, per group
    first: list[int]  # units that a window has left behind, per group
    room: int = 0  # tokens that the blocks held have place for, in every group
    units: list[PrefixEntry | None] = field(default_factory=list)  # full ones; None = its own
    tag: PrecisionTag | None = None  # widths at which its KV was computed
    note: object = None  # goes into the entries of its units


class KvCache:
    """KV pages of up to `max_sequences` sequences.

    Args:
        geometry: KV heads and head sizes of each layer.
        dtype: Of keys and values.
        first_owner: Owner numbers from here on are sequences, the last one the prefix cache.
        chunk_tokens: Tokens of a sequence in one step at most; None = `max_tokens`.
        prefix_rule: Which units may be used again (see `PrefixCache`); None = there is no cache.

    Attributes:
        unit: Tokens of a unit.
        shapes: Of the groups.
        opened: [max_sequences] int64, how often each row has been given to a sequence.
        prefix: The prefix cache, if there is one.
        counters: For `paged_attention` over these pages, one call after the other.
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
        *,
        chunk_tokens: int | None = None,
        prefix_rule: str | None = None,
    ) -> None:
        self._arena, self._pool, self._first_owner = arena, pool, first_owner
        self.chunk_tokens = max_tokens if chunk_tokens is None else chunk_tokens
        self._rows = list(range(max_sequences - 1, -1, -1))
        self._groups: list[_Group] = []
        self._where: dict[int, tuple[int, int]] = {}  # layer -> (group, position)
        self._views: dict[int, LayerPages] = {}
        self.sequences: dict[int, KvSequence] = {}  # by row
        self._own_pages = 0
        self.opened = np.zeros(max_sequences, dtype=np.int64)
        self.shapes = group_shapes(geometry, dtype, arena.page_bytes)
        self.counters = attention_counters(arena.pages.device)
        self.unit = unit_tokens(self.shapes)
        self._page_tokens = [shape.tokens_per_page for shape in self.shapes]
        for shape in self.shapes:
            table = np.full(
                (max_sequences, len(shape.layers), shape.blocks(max_tokens)), -1, dtype=np.int32
            )
            for position, layer in enumerate(shape.layers):
                self._where[layer.layer] = (len(self._groups), position)
                self._views[layer.layer] = layer_pages(arena, layer, dtype, shape.tokens_per_page)
            self._groups.append(_Group(shape, self.unit // shape.tokens_per_page, table))
        self.prefix: PrefixCache | None = None
        if prefix_rule is not None:
            owner = first_owner + max_sequences
            self.prefix = PrefixCache(pool, self.shapes, self.unit, owner, prefix_rule)

    # -- counting --------------------------------------------------------------------------

    @property
    def used_pages(self) -> int:
        """Pages that sequences hold, shared ones once."""
        return self._own_pages + (0 if self.prefix is None else self.prefix.used_pages)

    def pages_for_tokens(self, tokens: int) -> int:
        """Most pages that a sequence holds at once, over all layers, on its way to a length."""
        return peak_pages(self.shapes, tokens, self.chunk_tokens)

    def pages_to_grow(self, sequence: KvSequence, tokens: int) -> int:
        """Pages that a sequence still needs to hold `tokens` tokens."""
        if tokens <= sequence.room:
            return 0
        return sum(
            len(group.shape.layers) * max(0, group.shape.blocks(tokens) - held)
            for group, held in zip(self._groups, sequence.blocks, strict=True)
        )

    def pages_ahead(self, sequence: KvSequence, tokens: int) -> int:
        """Pages that a sequence will hold at most on its way to `tokens` tokens, beyond its own."""
        pages = 0
        for number, group in enumerate(self._groups):
            growth = max(0, group.shape.blocks(tokens) - sequence.blocks[number])
            if growth and group.shape.window is not None:
                held = sequence.blocks[number] - sequence.first[number] * group.unit_blocks
                peak = peak_blocks(group.shape, tokens, self.chunk_tokens, self.unit)
                growth = max(0, min(growth, peak - held))
            pages += len(group.shape.layers) * growth
        return pages

    def pages_of(self, sequence: KvSequence) -> list[int]:
        """Pages that a sequence holds, shared ones included."""
        held = self._held(sequence)
        return [page for place in held for page in self._unit_pages(sequence, *place)]

    @property
    def block_tables(self) -> list[NDArray[np.int32]]:
        """By group [rows, layers, blocks], -1 = no page: to be copied elsewhere, not written."""
        return [group.table for group in self._groups]

    @property
    def table_bytes(self) -> int:
        """Bytes of the block tables, and of the copy of them that a step reads."""
        return 2 * sum(group.table.nbytes for group in self._groups)

    # -- allocating ------------------------------------------------------------------------

    def open(self, match: PrefixMatch | None = None) -> KvSequence:
        """Start a sequence, with the pages of the prefix that was found for it.

        The caller keeps within `max_sequences`.
        """
        row, empty = self._rows.pop(), [0] * len(self._groups)
        sequence = KvSequence(row, self._first_owner + row, list(empty), list(empty))
        self.sequences[row] = sequence
        self.opened[row] += 1
        if match is not None and match.entries:
            self._join(sequence, match)
        return sequence

    def _join(self, sequence: KvSequence, match: PrefixMatch) -> None:
        assert self.prefix is not None
        count = len(match.entries)
        sequence.units, sequence.first = list(match.entries), list(match.first)
        sequence.tag, sequence.note = match.entries[-1].tag, match.entries[-1].note
        sequence.blocks = [count * group.unit_blocks for group in self._groups]
        sequence.room = count * self.unit
        for number, group in enumerate(self._groups):
            for unit in range(match.first[number], count):
                part = match.entries[unit].parts[number]
                assert part is not None
                self.prefix.use(part)
                start = unit * group.unit_blocks
                group.table[sequence.row, :, start : start + group.unit_blocks] = np.reshape(
                    part.pages, (len(group.shape.layers), -1)
                )

    def grow(self, sequence: KvSequence, tokens: int) -> None:
        """Give a sequence the pages to hold `tokens` tokens.

        Raises:
            OutOfPagesError: Not enough pages are free; the sequence is as before.
        """
        count = self.pages_to_grow(sequence, tokens)
        if count == 0:
            return
        pages = self._pool.take(count, sequence.owner)
        self._own_pages += count
        taken = 0
        for number, group in enumerate(self._groups):
            held, wanted = sequence.blocks[number], group.shape.blocks(tokens)
            if wanted <= held:
                continue
            layers = len(group.shape.layers)
            size = (wanted - held) * layers
            chunk = np.array(pages[taken : taken + size], dtype=np.int32)
            group.table[sequence.row, :, held:wanted] = chunk.reshape(layers, -1)
            sequence.blocks[number] = wanted
            taken += size
        sequence.room = min(map(int.__mul__, sequence.blocks, self._page_tokens), default=tokens)

    def slide(self, sequence: KvSequence, computed: int) -> None:
        """Let go of units that no token from position `computed` on can see."""
        for number, group in enumerate(self._groups):
            if group.shape.window is None:
                continue
            first = first_unit(group.shape.window, computed, self.unit)
            for unit in range(sequence.first[number], first):
                self._let_go(sequence, number, unit)
            sequence.first[number] = max(first, sequence.first[number])

    def close(self, sequence: KvSequence, *, keep: bool = True) -> None:
        """End a sequence. Its pages are free; what the prefix cache knows of them may stay idle.

        Args:
            sequence: The sequence.
            keep: False where its KV may be wrong: nobody finds its units again.
        """
        if not keep and self.prefix is not None:
            for entry in sequence.units:
                if entry is not None:
                    self.prefix.forget(entry)
        # Last units first: one without those before it is of no use, so it is to go before them.
        ends = [
            -(-held // group.unit_blocks)
            for held, group in zip(sequence.blocks, self._groups, strict=True)
        ]
        for unit in reversed(range(max(ends, default=0))):
            for number, end in enumerate(ends):
                if sequence.first[number] <= unit < end:
                    self._let_go(sequence, number, unit)
        for group in self._groups:
            group.table[sequence.row] = -1
        del self.sequences[sequence.row]
        self._rows.append(sequence.row)

    def _let_go(self, sequence: KvSequence, number: int, unit: int) -> None:
        """Give up the pages of one unit, or what there is of it, in one group."""
        part = self._part(sequence, number, unit)
        if part is not None:
            assert self.prefix is not None
            self.prefix.leave(part)
        else:
            pages = self._unit_pages(sequence, number, unit)
            self._pool.give_back(pages, sequence.owner)
            self._own_pages -= len(pages)
        blocks = self._groups[number].unit_blocks
        self._groups[number].table[sequence.row, :, unit * blocks : (unit + 1) * blocks] = -1

    def _unit_pages(self, sequence: KvSequence, number: int, unit: int) -> list[int]:
        group = self._groups[number]
        start = unit * group.unit_blocks
        end = min(start + group.unit_blocks, sequence.blocks[number])
        return group.pages(sequence.row, start, end)

    @staticmethod
    def _part(sequence: KvSequence, number: int, unit: int) -> Part | None:
        """The shared pages of a unit in one group; None where they are the sequence's own."""
        entry = sequence.units[unit] if unit < len(sequence.units) else None
        return None if entry is None else entry.parts[number]

    # -- sharing ---------------------------------------------------------------------------

    def record(
        self, sequence: KvSequence, computed: int, chain: PrefixChain, tag: PrecisionTag
    ) -> None:
        """Take note that tokens up to `computed` are stored: their units can be used again.

        Args:
            sequence: The sequence.
            computed: Tokens stored.
            chain: Its digests, of at least that many tokens.
            tag: Widths of the experts in the step that has just ended.
        """
        if self.prefix is None:
            return
        if sequence.tag != tag:
            sequence.tag = tag if sequence.tag is None else sequence.tag.merged(tag)
        for unit in range(len(sequence.units), computed // self.unit):
            parts = [
                None if first > unit else self._unit_pages(sequence, number, unit)
                for number, first in enumerate(sequence.first)
            ]
            entry = None
            if self.prefix.wants(chain.digests[unit], sequence.tag, parts):
                entry = self.prefix.enter(
                    chain.digests[unit], sequence.tag, sequence.note, parts, sequence.owner
                )
                self._own_pages -= sum(len(pages) for pages in parts if pages)
            sequence.units.append(entry)

    def annotate(self, sequence: KvSequence, note: object) -> None:
        """Leave a note with all units of a sequence, those to come too, where none has been."""
        sequence.note = note
        for entry in sequence.units:
            if entry is not None and entry.note is None:
                entry.note = note

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
        device, batches = self._arena.pages.device, []
        for group in self._groups:
            size = group.shape.tokens_per_page
            tables = group.table[rows, :, : group.shape.blocks(longest)]
            tables = np.ascontiguousarray(tables.transpose(1, 0, 2))
            pages = tables[:, token_sequence, positions // size]
            # NumPy lays out what it picks as it likes: kernels want the slots of a layer together.
            slots = np.ascontiguousarray(pages, dtype=np.int64) * size + positions % size
            batches.append(GroupBatch(to_device(tables, device), to_device(slots, device)))
        return batches

    # -- checking --------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Each sequence owns exactly the pages in its block tables that it does not share.

        Raises:
            AssertionError: The books and the pool disagree.
        """
        own, used = 0, []
        for row, sequence in self.sequences.items():
            for number, unit in self._held(sequence):
                pages = self._unit_pages(sequence, number, unit)
                part = self._part(sequence, number, unit)
                if part is not None:
                    used.append(part)
                    if part.pages != pages:
                        raise AssertionError(f"sequence in row {row}: not the pages of its prefix")
                elif not (self._pool.owner[pages] == sequence.owner).all():
                    raise AssertionError(f"sequence in row {row}: pages of another owner")
                else:
                    own += len(pages)
        if self.prefix is not None:
            self.prefix.check_integrity(used)
        owned = int((self._pool.owner >= self._first_owner).sum())
        if own != self._own_pages or owned != self.used_pages:
            raise AssertionError(f"{owned} KV pages in the pool, {self.used_pages} in sequences")

    def _held(self, sequence: KvSequence) -> Iterator[tuple[int, int]]:
        """(group, unit) of all that a sequence holds."""
        for number, group in enumerate(self._groups):
            end = -(-sequence.blocks[number] // group.unit_blocks)
            for unit in range(sequence.first[number], end):
                yield number, unit
