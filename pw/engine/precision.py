"""Carries out what planner and pressure policy decide: who gives up planes, who gets them back.

Everything happens at the safe point, between two forward steps, and every change is written to
the trace with its reason. The controller decides nothing about quality (`pw.planning`) and copies
nothing (`pw.memory.mover`).
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from typing import Protocol

import numpy as np

from pw.config import PlannerConfig
from pw.engine.quality import Quality
from pw.engine.scheduler import Relief
from pw.engine.trace import Replay, TraceWriter, Transition
from pw.memory.mover import Mover
from pw.memory.page_table import WeightPageTable
from pw.memory.pool import PagePool
from pw.planning.planner import Move, PlannerState, plan, plan_reload
from pw.planning.pressure import HELD_UP, PressurePolicy
from pw.planning.rebalance import rebalance

_HISTORY = 64
URGENT = ("kv allocation", "last resort")  # reasons of a release inside a scheduling round


class Precision(Relief, Protocol):
    """Who changes bits, seen by the engine."""

    bytes_released: int
    bytes_reloaded: int
    transitions: int
    plans: int

    @property
    def pending(self) -> bool:
        """More would change at later safe points, even if no request came."""

    @property
    def history(self) -> tuple[dict[str, object], ...]:
        """The latest plans, newest last."""

    def safe_point(self, step: int, turn: int, pages_ahead: int, idle: bool) -> None:
        """Change bits where that is due, between two forward steps.

        Args:
            step: Number of the forward step that comes next.
            turn: Safe points so far, those of an idle engine included.
            pages_ahead: KV pages that running requests will soon ask for.
            idle: No request runs or waits.
        """


class FixedPrecision:
    """Static widths, or no widths at all (dense): nothing to release, nothing to raise."""

    pending = False
    history: tuple[dict[str, object], ...] = ()
    bytes_released = bytes_reloaded = transitions = plans = 0

    def release(self, pages: int, reason: str, *, last_resort: bool = False) -> int:
        """See `pw.engine.scheduler.Relief`."""
        return 0

    def releasable(self) -> int:
        """See `pw.engine.scheduler.Relief`."""
        return 0

    def safe_point(self, step: int, turn: int, pages_ahead: int, idle: bool) -> None:
        """Nothing moves."""


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
        self.bytes_released = self.bytes_reloaded = self.transitions = self.plans = 0

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
        rows = np.arange(len(state.bits))
        floors = np.minimum(state.floors, state.bits)
        now = self._cost[rows, state.index(state.bits)]
        return int((now - self._cost[rows, state.index(floors)]).sum()) // self._page_bytes

    def _state(self, *, hard: bool) -> PlannerState:
        """What the planner sees. Blocks in transfer stay; `hard`: no floor but the least width."""
        bits = self._table.committed.copy()
        ceil = np.full_like(bits, self._max_bits)
        state = self._quality.state(bits, ceil)
        floors = state.floors.clip(self._min_bits, self._max_bits)
        if hard:
            floors = np.full_like(bits, self._min_bits)
        if self._table.in_transfer:
            moving = list(self._table.in_transfer)
            floors[moving] = ceil[moving] = bits[moving]
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
        self._mover.start(move)
        self._log("begin_raise", index, move.from_bits, to_bits, len(move.pages), damage, reason)

    def _cancel_raise(self, index: int, reason: str) -> None:
        move = self._table.in_transfer[index]
        self._table.cancel_raise(index)
        self._log("cancel_raise", index, move.from_bits, move.to_bits, 0, 0.0, reason)

    def _land(self, landed: list[int], reason: str = "landed") -> None:
        for index in landed:
            move = self._table.in_transfer[index]
            free = self._pool.free_count
            bits = self._table.commit_raise(index)
            if bits == move.to_bits:
                self.transitions += 1
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

    def _note_plan(self, reason: str, moves: tuple[Move, ...], pages: int, wanted: int) -> None:
        self.plans += 1
        record: dict[str, object] = {
            "step": self._step,
            "reason": reason,
            "moves": len(moves),
            "pages_wanted": wanted,
            "pages": pages,
            "damage": sum(move.damage for move in moves),
            "mean_bits": self._table.mean_bits(),
            "pages_free": self._pool.free_count,
        }
        self._history.append(record)
        self._trace.write("plan", **record)


class AdaptivePrecision(PrecisionBase):
    """Planes are given up when KV needs pages and come back when it does not."""

    def __init__(
        self,
        table: WeightPageTable,
        pool: PagePool,
        mover: Mover,
        trace: TraceWriter,
        quality: Quality,
        bounds: tuple[int, int],
        config: PlannerConfig,
    ) -> None:
        super().__init__(table, pool, mover, trace, quality, bounds)
        self._config = config
        self._pressure = PressurePolicy(config, self._page_bytes)
        self._rebalanced_at = 0
        self._held_up = False  # dwell or transfer budget alone keep planes from coming back
        self._raised_at = np.full(table.geometry.blocks, -(1 << 30), dtype=np.int64)

    @property
    def pending(self) -> bool:
        """See `Precision`."""
        return self._held_up or bool(self._table.in_transfer)

    def release(self, pages: int, reason: str, *, last_resort: bool = False) -> int:
        """See `pw.engine.scheduler.Relief`."""
        recent = self._turn - self._raised_at < self._config.dwell_steps
        state = self._state(hard=last_resort)
        found = plan(state, pages * self._page_bytes, method=self._config.planner, protected=recent)
        freed = sum(
            self._reduce(move.block, move.to_bits, move.damage, reason) for move in found.moves
        )
        if found.moves:
            self._note_plan(reason, found.moves, freed, pages)
            self._pressure.note_release(self._turn)
        if freed < pages and self._table.in_transfer:
            freed += self._recall(reason)
        return freed

    def safe_point(self, step: int, turn: int, pages_ahead: int, idle: bool) -> None:
        """Commit what has landed, then let the pressure policy move planes."""
        self._step, self._turn = step, turn
        self._land(self._mover.poll())
        below = int((self._max_bits - self._table.desired).clip(min=0).sum())
        decision = self._pressure.decide(
            now_step=turn,
            now_seconds=time.monotonic(),
            pages_free=self._pool.free_count,
            pages_total=self._pool.num_pages,
            forecast_pages=pages_ahead,
            bits_below_max=below,
            moving=bool(self._table.in_transfer),
            idle=idle,
        )
        self._held_up = decision.reload_pages > 0 or decision.reason in HELD_UP
        if decision.release_pages:
            self.release(decision.release_pages, decision.reason)
        elif decision.reload_pages:
            if not self._reload(decision.reload_pages, decision.reason):
                self._pressure.reload_refused(turn, decision)
        elif below and not self._table.in_transfer and self._rebalance_is_due(turn):
            self._rebalance()

    def _reload(self, pages: int, reason: str) -> bool:
        """Start raises worth so many pages. False when no block's next plane fits."""
        found = plan_reload(self._state(hard=False), pages * self._page_bytes)
        started = [move for move in found.moves if self._start_raise(move, reason)]
        if started:
            taken = sum(len(self._table.in_transfer[move.block].pages) for move in started)
            self._note_plan(reason, tuple(started), taken, pages)
        return bool(started)

    def _rebalance_is_due(self, turn: int) -> bool:
        every = self._config.rebalance_steps
        return every > 0 and turn - self._rebalanced_at >= every

    def _rebalance(self) -> None:
        """Let planes change hands at constant bytes where routing or prompts have moved on."""
        self._rebalanced_at = self._turn
        bytes_at_most = self._config.transfer_budget_bytes // 4
        trade = rebalance(self._state(hard=False), bytes_at_most)
        if trade is None:
            return
        free = self._pool.free_count
        for move in trade.down.moves:
            self._reduce(move.block, move.to_bits, move.damage, "rebalance")
        spent = self._pool.free_count - free
        started = [move for move in trade.up.moves if self._start_raise(move, "rebalance")]
        self._note_plan("rebalance", (*trade.down.moves, *started), spent, spent)

    def _start_raise(self, move: Move, reason: str) -> bool:
        """Start a raise if its pages are free."""
        if self._table.raise_pages(move.block, move.to_bits) > self._pool.free_count:
            return False
        self._begin_raise(move.block, move.to_bits, move.damage, reason)
        self._raised_at[move.block] = self._turn
        return True

    def _recall(self, reason: str) -> int:
        """Take back the pages of raises under way; waits for their copies to end."""
        for index in list(self._table.in_transfer):
            self._cancel_raise(index, reason)
        free = self._pool.free_count
        self._land(self._mover.wait(), reason)
        return self._pool.free_count - free


class ReplayedPrecision(PrecisionBase):
    """Repeats the transitions of a trace before the same steps."""

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

    def release(self, pages: int, reason: str, *, last_resort: bool = False) -> int:
        """Apply what the trace did at this step when pages ran out, if it is still to come."""
        return self._apply(urgent=True)

    def safe_point(self, step: int, turn: int, pages_ahead: int, idle: bool) -> None:
        """Apply the transitions that the trace has before this step."""
        self._step = step
        self._apply(urgent=False)

    def _apply(self, *, urgent: bool) -> int:
        """Transitions of this step, in order, up to the first of the other kind; pages freed."""
        todo = self._transitions.get(self._step, [])
        free = self._pool.free_count
        while todo and (todo[0].reason in URGENT) == urgent:
            self._do(todo.pop(0))
        return max(0, self._pool.free_count - free)

    def _do(self, transition: Transition) -> None:
        index = self._table.geometry.index(transition.key)
        if transition.event == "reduce":
            self._reduce(index, transition.to_bits, 0.0, transition.reason)
        elif transition.event == "begin_raise":
            self._begin_raise(index, transition.to_bits, 0.0, transition.reason)
        elif transition.event == "cancel_raise":
            self._cancel_raise(index, transition.reason)
        else:
            self._copied += self._mover.wait()
            self._copied.remove(index)
            self._land([index], transition.reason)
