"""Page table, mover and runner of rank 0: what they do, the followers do too.

Page table and mover note every change for the followers' next turn, the runner sends each step
before it computes it. A raise is committed when its copies have ended on all ranks: until then it
is under way on all, whichever is late; if they failed on one, it has failed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pw.engine.experts import RoutedExperts
from pw.engine.parallel import messages
from pw.engine.parallel.rank_table import RankTable
from pw.engine.parallel.team import Team
from pw.engine.precision.policies import FixedPrecision
from pw.engine.runner import ModelRunner
from pw.engine.scheduler import Forecast
from pw.engine.sequence import Chunk
from pw.errors import StoreError
from pw.memory.kv_cache import KvCache
from pw.memory.mover import Mover
from pw.memory.page_table import Raise
from pw.models.skeleton import Skeleton

if TYPE_CHECKING:
    from pw.engine.sampling.logprobs import Scored


class LeadTable(RankTable):
    """A page table whose changes are the followers' too."""

    def __init__(self, *arguments: Any, team: Team) -> None:
        super().__init__(*arguments)
        self._team = team

    def load(self, bits: NDArray[np.int64]) -> None:
        """See `WeightPageTable`. All ranks load at the same time."""
        self._team.note(messages.Load(bits.tolist()))
        self._team.turn()
        super().load(bits)

    def reduce(self, index: int, to_bits: int) -> int:
        """See `WeightPageTable`.

        Raises:
            OSError, StoreError: The LUT cannot be read, here or on another rank.
        """
        if self._store.on_disk(index, to_bits):
            self._team.fetch(index, to_bits)
        freed = super().reduce(index, to_bits)
        self._team.note(messages.Reduce(index, to_bits))
        return freed

    def commit_raise(self, index: int) -> int:
        """See `WeightPageTable`."""
        self._team.note(messages.Commit(index))
        return super().commit_raise(index)

    def cancel_raise(self, index: int) -> None:
        """See `WeightPageTable`."""
        self._team.note(messages.Cancel(index))
        super().cancel_raise(index)

    def check_integrity(self) -> None:
        """See `WeightPageTable`; of every rank, and all are alike.

        Raises:
            EngineLostError: A follower has ended, or has found its own table wrong.
        """
        super().check_integrity()
        self._team.compare(self.digest())


@dataclass
class _Open:
    """A raise that has not ended on all ranks."""

    index: int
    ranks: set[int] = field(default_factory=set)  # on which it has
    error: Exception | None = None


class LeadMover(Mover):
    """A mover whose raises have landed when they have landed on every rank."""

    def __init__(self, *arguments: Any, team: Team, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._team = team
        self._serials = 0
        self._open: dict[int, _Open] = {}  # by serial, in the order of `start`
        self._serial_of: dict[int, int] = {}  # by block
        self._spoilt: list[tuple[int, Exception]] = []

    @property
    def pending(self) -> int:
        """Raises that have not ended on all ranks."""
        return len(self._open)

    def start(self, move: Raise, *, urgent: bool = False) -> None:
        """See `Mover`."""
        self._serials += 1
        self._open[self._serials] = _Open(move.index)
        self._serial_of[move.index] = self._serials
        begin = messages.Begin(self._serials, move.index, move.to_bits, move.pages, urgent)
        self._team.note(begin)
        super().start(move, urgent=urgent)

    def poll(self) -> list[int]:
        """See `Mover`. Followers move on too; what they tell is of their last turn at best.

        Raises:
            EngineLostError: A follower has ended.
        """
        self._team.check()
        if not self._open:
            return []
        self._team.turn()
        return self._settle(super().poll())

    def wait(self) -> list[int]:
        """See `Mover`."""
        landed = self._settle(super().wait())
        while self._open:
            self._team.check()
            self._team.turn()
            landed += self._settle([])
        return landed

    def drop(self) -> list[int]:
        """See `Mover`. On the other ranks too, before they write anything else."""
        super().drop()
        self._team.note(messages.Drop())
        dropped = [entry.index for entry in self._open.values()]
        dropped += [index for index, _ in self._spoilt]
        self._open.clear()
        self._serial_of.clear()
        self._spoilt.clear()
        return dropped

    def take_failed(self) -> list[tuple[int, Exception]]:
        """See `Mover`. Those that have failed on any rank, and ended on all."""
        failed, self._spoilt = self._spoilt, []
        return failed

    def _settle(self, landed: list[int]) -> list[int]:
        """Take in what has ended here and elsewhere; blocks that have now landed on all ranks."""
        for index in landed:
            self._end(self._serial_of[index], 0)
        for index, error in super().take_failed():
            self._end(self._serial_of[index], 0, error)
        for rank, progress in self._team.progress():
            for serial in progress.landed:
                self._end(serial, rank)
            for serial, text in progress.failed.items():
                self._end(serial, rank, StoreError(f"rank {rank}: {text}"))
        everywhere = []
        for serial, entry in list(self._open.items()):
            if len(entry.ranks) < self._team.size:
                continue
            del self._open[serial]
            del self._serial_of[entry.index]
            if entry.error is None:
                everywhere.append(entry.index)
            else:
                self._spoilt.append((entry.index, entry.error))
        return everywhere

    def _end(self, serial: int, rank: int, error: Exception | None = None) -> None:
        """Note the end of a raise's copies on a rank; it may have been dropped since."""
        entry = self._open.get(serial)
        if entry is not None:
            entry.ranks.add(rank)
            entry.error = entry.error or error


class LeadFixed(FixedPrecision):
    """Static widths, or none, on all ranks."""

    def __init__(self, team: Team) -> None:
        self._team = team

    def safe_point(self, step: int, turn: int, forecast: Forecast, idle: bool) -> None:
        """See `FixedPrecision`.

        Raises:
            EngineLostError: A follower has ended.
        """
        self._team.check()


class LeadRunner(ModelRunner):
    """A runner that the other ranks follow: each step is sent, then computed by all of them."""

    def __init__(
        self,
        skeleton: Skeleton,
        experts: RoutedExperts,
        kv: KvCache,
        vocabulary: int,
        *,
        team: Team,
    ) -> None:
        super().__init__(skeleton, experts, kv, vocabulary)
        self._team = team
        self._tables = kv.block_tables
        self._told = [np.full_like(table, -1) for table in self._tables]

    def capture(self, most: int) -> None:
        """See `ModelRunner`. All ranks capture the same steps in the same order, or none replays.

        The first runs of a step add up over the ranks; its capture asks nothing of the others, nor
        do prompts that are rehearsed.
        """
        with self._team.in_step(math.inf):  # kernels are compiled, for every batch size
            self._team.capture(most)
            super().capture(most)
            if not self._team.group.agree(self.steps is not None):
                self.release()

    def run(self, chunks: list[Chunk]) -> tuple[Tensor, dict[Chunk, Scored]]:
        """See `ModelRunner`.

        Raises:
            EngineLostError: It broke: the ranks are no longer in step.
        """
        with self._team.in_step():
            self._team.turn(self._step(chunks))
            return super().run(chunks)

    def run_ahead(self, chunks: list[Chunk], drawn: Tensor) -> Tensor:
        """See `ModelRunner`. The others add zeros to the tokens, and so get them.

        Raises:
            EngineLostError: It broke.
        """
        with self._team.in_step():
            self._team.turn(self._step(chunks, ahead=True))
            return super().run_ahead(chunks, self._team.group.all_reduce(drawn))

    def wait(self, arrived: Callable[[], None]) -> None:
        """See `ModelRunner`. A rank that is lost or late ends it.

        Raises:
            EngineLostError: It has.
        """
        with self._team.watched(0):
            arrived()

    def first_not_finite(self, chunk: Chunk) -> str:
        """See `ModelRunner`. The others compute it again, too."""
        with self._team.in_step():
            self._team.turn(self._step([chunk]))
            return super().first_not_finite(chunk)

    def _step(self, chunks: list[Chunk], *, ahead: bool = False) -> messages.Step:
        known = [] if ahead else chunks
        rows = [chunk.sequence.kv_row for chunk in chunks]
        return messages.Step(
            rows=rows,
            starts=[chunk.start for chunk in chunks],
            counts=[chunk.count for chunk in chunks],
            tokens=[token for chunk in known for token in chunk.token_ids()],
            prompts=[chunk.is_prompt for chunk in chunks],
            samples=[chunk.samples for chunk in chunks],
            watched=[
                chunk.sequence.statistics is not None or bool(chunk.scored_targets())
                for chunk in chunks
            ],
            patches=self._patches(rows),
            ahead=ahead,
        )

    def _patches(self, rows: list[int]) -> list[messages.Patch]:
        """Entries of these rows of the block tables that the followers do not have yet."""
        patches = []
        for group, (now, told) in enumerate(zip(self._tables, self._told, strict=True)):
            fresh = ((now[rows] != told[rows]) & (now[rows] >= 0)).any(axis=1)  # [rows, blocks]
            for row, columns in zip(rows, fresh, strict=True):
                (places,) = np.nonzero(columns)
                if not len(places):
                    continue
                start, end = int(places[0]), int(places[-1]) + 1
                part = np.ascontiguousarray(now[row, :, start:end])
                told[row, :, start:end] = part
                patches.append(messages.Patch(group, row, start, part.tobytes()))
        return patches
