"""What a follower has: the same page table, mover and runner as rank 0, told what to do.

Its pool gives out the pages that rank 0 has taken: as all arenas are laid out alike and every
change is made in rank 0's order, they are free here too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from pw.engine.experts import DenseExperts, PagedExperts, RoutedExperts
from pw.engine.parallel import messages
from pw.engine.parallel.rank_table import RankTable
from pw.engine.parallel.seat import by_rank, share_of
from pw.engine.runner import ModelRunner
from pw.engine.sequence import Chunk
from pw.engine.start.ground import Ground
from pw.errors import StoreError
from pw.memory.mover import Mover
from pw.memory.pool import FREE, PagePool
from pw.models.slicing import AllReduce

logger = logging.getLogger(__name__)


class DictatedPool(PagePool):
    """A pool whose pages are chosen elsewhere, but for those of the first widths.

    Before the first step both pools have the same history, so that they choose alike.
    """

    def __init__(self, num_pages: int) -> None:
        super().__init__(num_pages)
        self._dictated: list[int] | None = None

    def dictate(self, pages: list[int]) -> None:
        """What the next `take` gives out."""
        self._dictated = pages

    def take(self, count: int, owner: int) -> list[int]:
        """See `PagePool`."""
        if self._dictated is None:
            return super().take(count, owner)
        pages, self._dictated = self._dictated, None
        if len(pages) != count or not (self.owner[pages] == FREE).all():
            raise AssertionError(f"{count} pages asked for, told to take {pages[:8]}")
        self.owner[pages] = owner
        return pages

    def give_back(self, pages: Seq[int], owner: int) -> None:
        """See `PagePool`; nobody takes from the list of free pages any more."""
        if len(pages):
            self._change(pages, owner, FREE)


class Unwatched:
    """Statistics of a prompt that rank 0 takes: here only the sign that somebody does."""

    wants_moments = False

    def add_hidden(self, slot: int, hidden: Tensor) -> None:
        """See `pw.engine.precision.statistics.PromptStatistics`."""


@dataclass(frozen=True, eq=False)
class FollowedSequence:
    """What a step asks of a sequence, as far as the model's numbers depend on it."""

    kv_row: int
    statistics: Unwatched | None


@dataclass(frozen=True, eq=False)
class FollowedChunk:
    """A `Chunk` on a rank that knows no requests."""

    sequence: FollowedSequence
    start: int
    count: int
    tokens: list[int]
    is_prompt: bool
    samples: bool

    def token_ids(self) -> list[int]:
        """See `Chunk`."""
        return self.tokens

    def scored_targets(self) -> range:
        """See `Chunk`; rank 0 alone scores prompts."""
        return range(0)


class Followed:
    """A follower's half of the replica.

    Args:
        ground: Its part of the model, its arena.
        all_reduce: Adds up over the ranks.
    """

    def __init__(self, ground: Ground, all_reduce: AllReduce) -> None:
        self._ground, self._all_reduce = ground, all_reduce
        skeleton, source = ground.loaded.skeleton, ground.loaded.source
        self._table: RankTable | None = None
        self._mover: Mover | None = None
        self.host_bytes = 0
        self._serials: dict[int, int] = {}  # of raises under way, by block
        biases = (skeleton.activations, skeleton.biases)
        if ground.loaded.dense is not None:
            experts: RoutedExperts = DenseExperts(ground.loaded.dense, *biases)
        else:
            store = ground.plane_store()
            self._table = RankTable(
                source.geometry, ground.memory.layouts, ground.arena, ground.pool, store
            )
            self._mover = Mover(ground.arena, store, **ground.mover_settings())
            self._store = store
            self.host_bytes = store.bytes
            share = share_of(source)
            experts = PagedExperts(
                self._table,
                ground.arena,
                *biases,
                source.lut_dtype,
                None,
                ground.widths,
                None if share is None else share.whole.experts,
            )
        experts = by_rank(experts, source, None, skeleton.device)
        self._runner = ModelRunner(skeleton, experts, ground.kv, skeleton.vocab_size)

    def fetch(self, index: int, bits: int) -> str | None:
        """Read the LUT that a reduction will need; why it cannot be read, if it cannot."""
        try:
            self._store.lut(index, bits)
        except (OSError, StoreError) as error:
            return str(error)
        return None

    def compare(self) -> str:
        """Check the page table, if there is one; what it says.

        Raises:
            AssertionError: It contradicts itself.
        """
        if self._table is None:
            return ""
        self._table.check_integrity()
        return self._table.digest()

    def capture(self, most: int, agree: Callable[[bool], bool]) -> None:
        """Capture decode steps; keep them if all ranks have."""
        self._runner.capture(most)
        if not agree(self._runner.steps is not None):
            self._runner.release()

    def release(self) -> None:
        """Let go of what was captured: ranks do not part while graphs hold their sums."""
        self._runner.release()

    def change(self, changes: Seq[messages.Change]) -> messages.Progress | None:
        """Make the changes of a turn, and move copies on.

        Returns:
            What has ended with it, if anything has.
        """
        if self._table is None or self._mover is None:
            return None
        for change in changes:
            self._make(change, self._table, self._mover)
        landed = [self._serials.pop(index) for index in self._mover.poll()]
        failed = {self._serials.pop(i): str(error) for i, error in self._mover.take_failed()}
        return messages.Progress(landed, failed) if landed or failed else None

    def compute(self, step: messages.Step) -> None:
        """Compute a step with the others. Its logits are of no use here."""
        tables = self._ground.kv.block_tables
        for patch in step.patches:
            table = tables[patch.group]
            pages = np.frombuffer(patch.pages, np.int32).reshape(table.shape[1], -1)
            table[patch.row, :, patch.start : patch.start + pages.shape[1]] = pages
            self._ground.kv.opened[patch.row] += 1  # decode steps of fixed shape read it anew
        if self._table is not None:
            self._table.publish()
        chunks = cast(list[Chunk], _chunks(step))
        with self._runner.threads_for(chunks):
            if step.ahead:
                device = self._ground.loaded.skeleton.device
                none = torch.zeros(len(chunks), dtype=torch.int64, device=device)
                self._runner.run_ahead(chunks, self._all_reduce(none))
            else:
                self._runner.run(chunks)

    def _make(self, change: messages.Change, table: RankTable, mover: Mover) -> None:
        match change:
            case messages.Load(bits):
                table.load(np.array(bits, dtype=np.int64))
            case messages.Reduce(index, to_bits):
                table.reduce(index, to_bits)
            case messages.Begin(serial, index, to_bits, pages, urgent):
                cast(DictatedPool, self._ground.pool).dictate(pages)
                self._serials[index] = serial
                mover.start(table.begin_raise(index, to_bits), urgent=urgent)
            case messages.Commit(index):
                table.commit_raise(index)
            case messages.Cancel(index):
                table.cancel_raise(index)
            case messages.Drop():
                mover.drop()
                self._serials.clear()


def _chunks(step: messages.Step) -> list[FollowedChunk]:
    chunks, place = [], 0
    columns = (step.rows, step.starts, step.counts, step.prompts, step.samples, step.watched)
    parts: Any = zip(*columns, strict=True)
    for row, start, count, prompt, samples, watched in parts:
        tokens = step.tokens[place : place + count]
        place += count
        sequence = FollowedSequence(row, Unwatched() if watched else None)
        chunks.append(FollowedChunk(sequence, start, count, tokens, prompt, samples))
    return chunks
