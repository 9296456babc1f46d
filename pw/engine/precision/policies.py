"""Who changes bits: what all precision policies share, and those that decide nothing.

Everything happens at the safe point, between two forward steps, and every change is written to
the trace with its reason. `pw.engine.precision.adaptive` is the policy that moves planes by plan.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol

import numpy as np

from pw.engine.precision.quality import Quality
from pw.engine.precision.trace import Replay, TraceWriter, Transition
from pw.engine.scheduler import Forecast, Relief
from pw.memory.mover import Mover
from pw.memory.page_table import Raise, WeightPageTable
from pw.memory.pool import PagePool
from pw.planning.planner import Move, PlannerState, plan

_HISTORY = 64
URGENT = ("kv allocation", "last resort")  # reasons of a release inside a scheduling round
AWAITED = "floor"  # reason of a raise that a request waits for


logger = logging.getLogger(__name__)


class Precision(Relief, Protocol):
    """Who changes bits, seen by the engine."""

    bytes_released: int
    bytes_reloaded: int
    transitions: int
    moves: int  # raises that landed
    move_seconds: float  # of those, from their start to their commit
    plans: int  # carried out, also those that an earlier run of the planner has left over
    plan_runs: int  # of the planner, those that found nothing included
    plan_seconds: float  # of these
    failures: int  # transfers that failed; the old width stayed
    aim: int  # bits that the next request waits for: nothing is planned below; 0 = none

    @property
    def most_bits(self) -> int:
        """Bits that a block may have under the policy of now."""

    @property
    def plans_by_trigger(self) -> Mapping[str, int]:
        """Plans made so far, by reason."""

    @property
    def pending(self) -> bool:
        """More would change at later safe points, even if no request came."""

    @property
    def history(self) -> tuple[dict[str, object], ...]:
        """The latest plans, newest last."""

    def reach(self, bits: int, pages: int, alone: bool) -> str | None:
        """Move towards at least `bits` for every block. At safe points, until `holds(bits)`.

        Args:
            bits: What the next request asks for.
            pages: That must be free for KV besides.
            alone: Nothing runs whose pages might come free later.

        Returns:
            Why it will never be, if that is so.
        """

    def safe_point(self, step: int, turn: int, forecast: Forecast, idle: bool) -> None:
        """Change bits where that is due, between two forward steps.

        Args:
            step: Number of the forward step that comes next.
            turn: Safe points so far, those of an idle engine included.
            forecast: KV pages that will soon be asked for.
            idle: No request runs or waits.
        """

    def close(self) -> None:
        """End what works beside the steps; no safe point follows."""


class FixedPrecision:
    """Static widths, or no widths at all (dense): nothing to release, nothing to raise."""

    pending = False
    floor = aim = 0
    most_bits = 16
    history: tuple[dict[str, object], ...] = ()
    bytes_released = bytes_reloaded = transitions = moves = plans = failures = plan_runs = 0
    move_seconds = plan_seconds = 0.0
    plans_by_trigger: Mapping[str, int] = MappingProxyType({})

    def release(self, pages: int, reason: str, *, last_resort: bool = False) -> int:
        """See `pw.engine.scheduler.Relief`."""
        return 0

    def releasable(self) -> int:
        """See `pw.engine.scheduler.Relief`."""
        return 0

    def holds(self, bits: int) -> bool:
        """Requests that ask for more than there is are not admitted."""
        return True

    def reach(self, bits: int, pages: int, alone: bool) -> str | None:
        """Nothing moves."""
        return None

    def safe_point(self, step: int, turn: int, forecast: Forecast, idle: bool) -> None:
        """Nothing moves."""

    def close(self) -> None:
        """Nothing works beside the steps."""


class PrecisionBase:
    """The books that adaptive and replayed precision share."""

    def __init__(
        self,
        table: WeightPageTable,
        pool: PagePool,
        mover: Mover,
        trace: TraceWriter,
        quality: Quality,
        bounds: tuple[int, int],  # least and most bits of any block
    ) -> None:
        self._table, self._pool, self._mover, self._trace = table, pool, mover, trace
        self._quality = quality
        self._min_bits, self._max_bits = bounds
        self._page_bytes = table.layouts[0].page_bytes
        self._cost = table.cost_bytes()
        self._step = self._turn = 0
        self._history: deque[dict[str, object]] = deque(maxlen=_HISTORY)
        self._rests_until = np.zeros(table.geometry.blocks, dtype=np.int64)  # turn
        self.bytes_released = self.bytes_reloaded = 0
        self.transitions = self.moves = self.plans = self.failures = self.plan_runs = 0
        self.plans_by_trigger: Counter[str] = Counter()
        self.plan_seconds = self.move_seconds = 0.0
        self.floor = self.aim = 0
        self._begun: dict[int, float] = {}  # block in transfer -> monotonic seconds

    @property
    def most_bits(self) -> int:
        """See `Precision`."""
        return self._max_bits

    @property
    def pending(self) -> bool:
        """See `Precision`."""
        return bool(self._table.in_transfer)

    @property
    def history(self) -> tuple[dict[str, object], ...]:
        """The latest plans, newest last."""
        return tuple(self._history)

    def releasable(self) -> int:
        """See `pw.engine.scheduler.Relief`."""
        state = self._state(hard=False)
        if state.room() is not None:
            return plan(state, state.total_bytes).bytes // self._page_bytes
        rows = np.arange(len(state.bits))
        floors = np.minimum(state.floors, state.bits)
        now = self._cost[rows, state.index(state.bits)]
        return int((now - self._cost[rows, state.index(floors)]).sum()) // self._page_bytes

    def holds(self, bits: int) -> bool:
        """See `pw.engine.scheduler.Relief`."""
        return int(self._table.committed.min()) >= bits

    def close(self) -> None:
        """See `Precision`."""

    def _least(self, *, hard: bool) -> int:
        """Bits that no plan goes below. With `hard` those that a request only waits for do not
        count.
        """
        asked = self.floor if hard else max(self.floor, self.aim)
        return max(self._min_bits, min(asked, self._max_bits))

    def _state(self, *, hard: bool) -> PlannerState:
        """What the planner sees. Blocks in transfer stay, and those whose transfer failed lately.

        With `hard` no floor holds but the least width and those of requests that run, and nothing
        rests.
        """
        bits = self._table.committed.copy()
        ceil = np.full_like(bits, self._max_bits)
        state = self._quality.state(bits, ceil)
        least = self._least(hard=hard)
        floors = state.floors.clip(least, self._max_bits)
        fixed = self._rests_until > self._turn
        if hard:
            floors, fixed = np.full_like(bits, least), np.zeros_like(fixed)
        fixed[list(self._table.in_transfer)] = True
        floors[fixed] = ceil[fixed] = bits[fixed]
        return replace(state, floors=floors, layer_floor=0.0 if hard else state.layer_floor)

    def _reduce(self, index: int, to_bits: int, damage: float, reason: str) -> int:
        from_bits = int(self._table.committed[index])
        freed = self._table.reduce(index, to_bits)
        self.bytes_released += freed * self._page_bytes
        self.transitions += 1
        self._log("reduce", index, from_bits, to_bits, freed, damage, reason)
        return freed

    def _begin_raise(self, index: int, to_bits: int, damage: float, reason: str) -> None:
        move = self._table.begin_raise(index, to_bits)
        self._mover.start(move, urgent=reason == AWAITED)
        self._begun[index] = time.monotonic()
        self._log("begin_raise", index, move.from_bits, to_bits, len(move.pages), damage, reason)

    def _cancel_raise(self, index: int, reason: str) -> None:
        move = self._table.in_transfer[index]
        self._table.cancel_raise(index)
        self._log("cancel_raise", index, move.from_bits, move.to_bits, 0, 0.0, reason)

    def _give_up_raise(self, index: int) -> Raise:
        """Take back the pages of a raise whose bytes cannot be read; the old width is served on."""
        move = self._table.in_transfer[index]
        self._begun.pop(index)
        self._table.cancel_raise(index)
        self._table.commit_raise(index)
        return move

    def _land(self, landed: list[int], reason: str = "landed") -> None:
        for index in landed:
            move = self._table.in_transfer[index]
            free = self._pool.free_count
            bits = self._table.commit_raise(index)
            seconds = time.monotonic() - self._begun.pop(index)
            if bits == move.to_bits:
                self.transitions += 1
                self.moves += 1
                self.move_seconds += seconds
                self.bytes_reloaded += len(move.pages) * self._page_bytes
            pages = self._pool.free_count - free
            self._log("commit_raise", index, move.from_bits, bits, pages, 0.0, reason)

    def _log(
        self, event: str, index: int, old: int, new: int, pages: int, damage: float, reason: str
    ) -> None:
        key = self._table.geometry.key(index)
        self._trace.write(
            event,
            step=self._step,
            layer=key.layer,
            expert=key.expert,
            module=key.module,
            **{"from": old, "to": new},
            pages=pages,
            damage=damage,
            reason=reason,
        )

    @contextmanager
    def _planning(self) -> Iterator[None]:
        """Count a run of the planner, and its time."""
        begin = time.perf_counter()
        yield
        self._count_plan(time.perf_counter() - begin)

    def _count_plan(self, seconds: float) -> None:
        self.plan_seconds += seconds
        self.plan_runs += 1

    def _note_plan(
        self,
        reason: str,
        moves: tuple[Move, ...],
        pages: int,
        wanted: int,
        later: Iterable[Move] = (),  # of the moves, those not begun
    ) -> None:
        to_come = [(move.block, move.to_bits) for move in later]
        self.plans += 1
        self.plans_by_trigger[reason] += 1
        record: dict[str, object] = {
            "step": self._step,
            "reason": reason,
            "moves": len(moves),  # made, begun, or still to begin, of which some may be refused
            "pages_wanted": wanted,
            "pages": pages,
            "damage": sum(move.damage for move in moves),
            "mean_bits": self._table.mean_bits_desired(to_come),  # what the plan leads to
            "pages_free": self._pool.free_count,
        }
        self._history.append(record)
        self._trace.write("plan", **record)


class ReplayedPrecision(PrecisionBase):
    """Repeats the transitions of a trace before the same steps.

    The same requests at the same steps need nothing else. Where the requests differ the run
    diverges: a transition that cannot be made is left out, and when the oldest sequence would not
    fit, all blocks fall to their least width, as adaptive precision's last resort may.

    Attributes:
        diverged: Transitions left out or made up.
    """

    def __init__(
        self,
        table: WeightPageTable,
        pool: PagePool,
        mover: Mover,
        trace: TraceWriter,
        quality: Quality,
        bounds: tuple[int, int],
        replay: Replay,
    ) -> None:
        super().__init__(table, pool, mover, trace, quality, bounds)
        self._transitions = replay.transitions
        self._copied: list[int] = []  # blocks whose copy has ended before the trace commits it
        self.diverged = 0

    def release(self, pages: int, reason: str, *, last_resort: bool = False) -> int:
        """Apply what the trace did at this step when pages ran out, if it is still to come."""
        freed = self._apply(urgent=True)
        return self._give_up_all(reason) if last_resort and not freed else freed

    def safe_point(self, step: int, turn: int, forecast: Forecast, idle: bool) -> None:
        """Apply the transitions that the trace has before this step."""
        self._step = step
        self._apply(urgent=False)

    def reach(self, bits: int, pages: int, alone: bool) -> str | None:
        """See `Precision`. The trace has the moves; without steps no more of them come."""
        if self.holds(bits) or not alone:
            return None
        self._diverge(f"a request waits for {bits} bits")
        return f"the trace that is replayed does not reach {bits} bits"

    def _apply(self, *, urgent: bool) -> int:
        """Transitions of this step, in order, up to the first of the other kind; pages freed."""
        todo = self._transitions.get(self._step, [])
        free = self._pool.free_count
        while todo and (todo[0].reason in URGENT) == urgent:
            transition = todo.pop(0)
            index = self._table.geometry.index(transition.key)
            if self._possible(transition, index):
                self._do(transition, index)
            else:
                self._diverge(f"{transition.event} of {transition.key}")
        return max(0, self._pool.free_count - free)

    def _possible(self, transition: Transition, index: int) -> bool:
        table, to_bits = self._table, transition.to_bits
        if transition.event in ("commit_raise", "cancel_raise"):
            return index in table.in_transfer
        if index in table.in_transfer:
            return False
        if transition.event == "reduce":
            return self.floor <= to_bits < int(table.committed[index])
        return (
            to_bits > int(table.committed[index])
            and table.raise_pages(index, to_bits) <= self._pool.free_count
        )

    def _do(self, transition: Transition, index: int) -> None:
        if transition.event == "reduce":
            self._reduce(index, transition.to_bits, 0.0, transition.reason)
        elif transition.event == "begin_raise":
            self._begin_raise(index, transition.to_bits, 0.0, transition.reason)
        elif transition.event == "cancel_raise":
            self._cancel_raise(index, transition.reason)
        else:
            self._copied += self._mover.wait()
            for failed, error in self._mover.take_failed():
                self._give_up_raise(failed)
                raise error
            self._copied.remove(index)
            self._land([index], transition.reason)

    def _give_up_all(self, reason: str) -> int:
        self._diverge("the oldest sequence does not fit")
        free = self._pool.free_count
        least = self._least(hard=True)
        for index, bits in enumerate(self._table.committed.tolist()):
            if bits > least and index not in self._table.in_transfer:
                self._reduce(index, least, 0.0, reason)
        return self._pool.free_count - free

    def _diverge(self, what: str) -> None:
        if self.diverged == 0:
            logger.warning("the replay diverges from its trace at step %d: %s", self._step, what)
        self.diverged += 1
