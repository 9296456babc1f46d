"""Carries out what planner and pressure policy decide: who gives up planes, who gets them back.

Decides nothing about quality (`pw.planning`) and copies nothing (`pw.memory.mover`). A transfer
that fails changes nothing: the old width is served on, and its block rests for a while.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from pw.blocks import MODULES
from pw.config import PlannerConfig
from pw.engine.precision.pace import Pace
from pw.engine.precision.policies import AWAITED, PrecisionBase
from pw.engine.precision.quality import Quality
from pw.engine.precision.reserve import Reserve
from pw.engine.precision.trace import TraceWriter
from pw.engine.scheduler import Forecast
from pw.errors import StoreError
from pw.memory.mover import Mover
from pw.memory.page_table import Raise, WeightPageTable
from pw.memory.pool import PagePool
from pw.planning.planner import Move, PlannerState, plan, plan_reload
from pw.planning.pressure import HELD_UP, Decision, PressurePolicy
from pw.planning.rebalance import Trade, rebalance

logger = logging.getLogger(__name__)

_REST_TURNS = 256  # before a block whose transfer failed is planned for again
_RESERVE_SHARE = 128  # of the arena one part of so many is planned for beyond what is needed
# Raises under way while anything runs, as many as fill the mover's chunks: the rest of a plan is
# begun as they land, evenly, and keeps no pages until then.
UNDER_WAY = 32
REBALANCE = "rebalance"  # reason of what changes hands in a trade


class AdaptivePrecision(PrecisionBase):
    """Planes are given up when KV needs pages and come back when it does not.

    What a step waits for is done in its safe point: reductions that make room. All else is done a
    little at a time: raises are begun and committed, and planes traded, as long as a part of a step
    takes; on a GPU plans for them are made by a thread beside the steps.
    """

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
        self._bounds = bounds
        self._pressure = PressurePolicy(config, self._page_bytes)
        self._agenda: deque[tuple[Move, str]] = deque()  # planned and not begun, and why
        self._landed: deque[int] = deque()  # raises that have landed and are not committed
        self._pace = Pace()
        self._reserve = Reserve()
        self._thinker = ThreadPoolExecutor(1, "pw-plan") if table.on_gpu else None
        self._sought: Future[tuple[Trade | None, float]] | None = None  # by it
        self._trading = False  # what moves is of a trade
        self._rebalanced_at = 0
        self._idle = False
        self._held_up = False  # dwell or transfer budget alone keep planes from coming back
        self._raised_at = np.full(table.geometry.blocks, -(1 << 30), dtype=np.int64)

    @property
    def pending(self) -> bool:
        """See `Precision`."""
        return self._held_up or self._moving

    @property
    def _moving(self) -> bool:
        return bool(self._table.in_transfer or self._agenda or self._sought)

    def close(self) -> None:
        """See `Precision`."""
        self._sought = None
        if self._thinker is not None:
            self._thinker.shutdown(cancel_futures=True)

    def hold(self, bits: int | None) -> None:
        """Bring every block to one width, or with None go back to planning. Between two steps.

        Wider blocks fall at once; narrower ones rise at the safe points, as pages are free.
        """
        self._min_bits, self._max_bits = self._bounds if bits is None else (bits, bits)
        self._forget_plans()
        self._recall("policy")
        for index, now in enumerate(self._table.committed.tolist()):
            if now > self._max_bits:
                self._try_reduce(Move(index, now, self._max_bits, 0, 0.0), "policy")

    def release(self, pages: int, reason: str, *, last_resort: bool = False) -> int:
        """See `pw.engine.scheduler.Relief`. A trade goes on, unless nothing else is left."""
        freed, made, table = 0, list[Move](), self._table
        if last_resort:
            self._forget_plans()
        if not self._trading:
            self._agenda.clear()
            # Pages of planes that nobody has read yet cost nothing; their blocks take part again.
            freed = self._recall(reason)
        while freed < pages:
            failures, missing = self.failures, (pages - freed) * self._page_bytes
            if anew := not self._reserve.lasts(self._turn):
                self._plan_release(missing, hard=last_resort)
            least = self._least(hard=last_resort)
            for move in self._reserve.take(missing, table.committed, table.in_transfer, least):
                if given := self._try_reduce(move, reason, last_resort):
                    freed += given
                    made.append(move)
            if last_resort or (anew and self.failures == failures):
                break
        if made:
            self._note_plan(reason, tuple(made), freed, pages)
            self._pressure.note_release(self._turn)
        if freed < pages:
            self._forget_plans()
            freed += self._recall(reason)
        return freed

    def _plan_release(self, missing: int, *, hard: bool) -> None:
        """Plan reductions worth so many bytes and, where blocks that were raised a moment ago can
        be spared, more: under pressure the next steps will need some, too.
        """
        recent = self._turn - self._raised_at < self._config.dwell_steps
        more = 0 if hard else self._pool.num_pages // _RESERVE_SHARE * self._page_bytes
        with self._planning():
            state, method = self._state(hard=hard), self._config.planner
            spared = replace(state, floors=np.where(recent, state.bits, state.floors))
            found = plan(spared, missing + more, method=method)
            if found.bytes < missing:
                found = plan(state, missing, method=method, protected=recent)
            self._reserve.fill(state, found, self._turn)

    def _try_reduce(self, move: Move, reason: str, last_resort: bool = False) -> int:
        """Pages freed; 0 if the layer has come to its least mean bits since the move was planned,
        or if the narrower LUT cannot be read, which the base tree never needs.
        """
        if not last_resort and not self._layer_gives(move):
            return 0
        try:
            return self._reduce(move.block, move.to_bits, move.damage, reason)
        except (OSError, StoreError) as error:
            self._note_failure(move, error)
        base = self._table.layouts[move.block % len(MODULES)].base_bits
        if last_resort and base >= self._least(hard=True):
            return self._reduce(move.block, base, move.damage, reason)
        return 0

    def _layer_gives(self, move: Move) -> bool:
        """Whether a layer keeps its least mean bits. A plan sees to that for itself alone: what is
        kept of it, and trades found beside the steps, meet widths that others have lowered.
        """
        floor, geometry = min(self._config.layer_floor, self._max_bits), self._table.geometry
        if floor <= self._min_bits:
            return True
        bits = self._table.committed.reshape(len(geometry.layers), -1)
        of_layer = bits[move.block // bits.shape[1]]
        lost = move.from_bits - move.to_bits
        return int(of_layer.sum()) - lost >= floor * len(of_layer)

    def _note_failure(self, move: Move | Raise, error: Exception) -> None:
        """Count a transfer that failed; its block rests at its old width."""
        self.failures += 1
        index = move.index if isinstance(move, Raise) else move.block
        self._rests_until[index] = self._turn + _REST_TURNS
        key = self._table.geometry.key(index)
        logger.warning("%s stays at %d bits: %s", key, move.from_bits, error)
        self._log("failed", index, move.from_bits, move.to_bits, 0, 0.0, str(error))

    def safe_point(self, step: int, turn: int, forecast: Forecast, idle: bool) -> None:
        """Commit what has landed, then let the pressure policy move planes."""
        self._step, self._turn, self._idle = step, turn, idle
        self._pace.begin(idle=idle)
        self._landed += self._mover.poll()
        self._commit_landed()
        for index, error in self._mover.take_failed():
            self._note_failure(self._give_up_raise(index), error)
        below = int((self._max_bits - self._table.desired).clip(min=0).sum())
        # Raises under way give the pages of narrower LUTs back when they land.
        free = self._pool.free_count + self._table.pages_due()
        decision = self._pressure.decide(
            now_step=turn,
            now_seconds=time.monotonic(),
            pages_free=free,
            pages_total=self._pool.num_pages,
            forecast_pages=(ahead := self._forecast_pages(free, forecast)),
            bits_below_max=below,
            moving=self._moving,
            idle=idle,
        )
        self._held_up = decision.reload_pages > 0 or decision.reason in HELD_UP
        if decision.reload_pages:
            self._reload(decision)
            return
        if decision.release_pages:
            self.release(decision.release_pages, decision.reason)
        self._trading &= bool(self._table.in_transfer or self._agenda)
        if self._agenda:
            self._begin_planned(ahead + self._low_pages)
        elif self._sought is not None:
            if self._sought.done():
                sought, self._sought = self._sought, None
                self._trade(*sought.result())
        elif below and not self._table.in_transfer and self._rebalance_is_due(turn):
            self._rebalance()

    def _commit_landed(self) -> None:
        """Commit what has landed, a little at a time."""
        while self._landed:
            self._land([self._landed.popleft()])
            if self._pace.is_over():
                break

    def _forecast_pages(self, free: int, forecast: Forecast) -> int:
        """Pages to keep free: planes are given up for sequences that run, and do not come back
        over what the next one in the queue needs.
        """
        spare = max(0, free - forecast.running - self._low_pages)
        return forecast.running + min(forecast.waiting, spare)

    @property
    def _low_pages(self) -> int:
        """Free pages below which planes are given up."""
        return math.ceil(self._config.low_watermark * self._pool.num_pages) + 1

    def reach(self, bits: int, pages: int, alone: bool) -> str | None:
        """See `Precision`. Blocks above give up what those below need."""
        self.aim = 0
        below = np.flatnonzero(self._table.committed < bits)
        if not len(below):
            return None
        if bits > self._max_bits:
            return f"the precision policy allows {self._max_bits} bits, {bits} are asked for"
        if (self._rests_until[below] > self._turn).any():
            return f"planes of some blocks cannot be read, so {bits} bits cannot be reached"
        self.aim = bits
        self._forget_plans()
        still = [index for index in below.tolist() if index not in self._table.in_transfer]
        wanted = pages + sum(self._table.raise_pages(index, bits) for index in still)
        if not alone and wanted > self._pool.free_count + self.releasable():
            self.aim = 0  # running sequences keep their pages
            return None
        if wanted > self._pool.free_count:
            self._give(wanted - self._pool.free_count)
        self._raise_to(bits)
        return None

    def _give(self, pages: int) -> None:
        """Let blocks above the bits that are aimed at give up pages for those below."""
        with self._planning():
            found = plan(self._state(hard=False), pages * self._page_bytes)
        freed = [self._try_reduce(move, AWAITED) for move in found.moves]
        if made := tuple(move for move, got in zip(found.moves, freed, strict=True) if got):
            self._note_plan(AWAITED, made, sum(freed), pages)

    def _raise_to(self, bits: int) -> None:
        """Start raises of blocks below `bits` as far as pages are free."""
        state = self._state(hard=False)
        state = replace(
            state, ceil=np.where(state.bits < bits, np.minimum(bits, state.ceil), state.bits)
        )
        with self._planning():
            found = plan_reload(state, self._pool.free_count * self._page_bytes)
        started = [move for move in found.moves if self._start_raise(move, AWAITED)]
        if started:
            taken = sum(len(self._table.in_transfer[move.block].pages) for move in started)
            self._note_plan(AWAITED, tuple(started), taken, taken)

    def _reload(self, decision: Decision) -> None:
        """Plan raises worth the pages of a decision, and begin some: the others follow at later
        safe points. The decision is taken back where none fits.
        """
        pages, started = decision.reload_pages, list[Move]()
        self._reserve.clear()
        if pages >= self._least_raise():  # else a plan finds nothing, in a hundred times the time
            with self._planning():
                found = plan_reload(self._state(hard=False), pages * self._page_bytes)
            self._agenda.extend((move, decision.reason) for move in found.moves)
            started = self._begin_planned(0)
        if not started:
            self._pressure.reload_refused(self._turn, decision)
            return
        later = [move for move, _ in self._agenda]
        taken = sum(len(self._table.in_transfer[move.block].pages) for move in started)
        taken += sum(self._table.raise_pages(move.block, move.to_bits) for move in later)
        self._note_plan(decision.reason, (*started, *later), taken, pages, later)

    def _least_raise(self) -> float:
        """Fewest pages that the next plane of any block takes; infinite where none may rise."""
        bits = self._table.committed
        rising = (bits < self._max_bits) & (self._rests_until <= self._turn)
        rising[list(self._table.in_transfer)] = False
        blocks = np.flatnonzero(rising)
        if not len(blocks):
            return math.inf
        width = bits[blocks] - self._table.min_bits
        more = self._cost[blocks, width + 1] - self._cost[blocks, width]
        return int(more.min()) // self._page_bytes

    def _begin_planned(self, keep: int) -> list[Move]:
        """Carry out what still holds of the agenda, raises only as they leave `keep` pages free; a
        little at a time while anything runs. Requests that have come since a trade was looked for
        keep the bits that they were promised; a trade ends at a reduction that cannot be made.
        """
        begun: list[Move] = []
        under_way, least = self._table.in_transfer, self._least(hard=False)
        while self._agenda and (self._idle or len(under_way) < UNDER_WAY):
            if begun and self._pace.is_over():
                break
            move, reason = self._agenda.popleft()
            holds = self._table.committed[move.block] == move.from_bits
            holds = holds and move.block not in under_way
            if move.to_bits > move.from_bits:  # of a trade: its reductions have paid for it
                spared = 0 if reason == REBALANCE else keep
                done = holds and self._start_raise(move, reason, spared)
            elif not (done := holds and move.to_bits >= least and self._try_reduce(move, reason)):
                self._agenda.clear()  # what is left of the trade would go unpaid
            if done:
                begun.append(move)
        return begun

    def _rebalance_is_due(self, turn: int) -> bool:
        every = self._config.rebalance_steps
        return every > 0 and turn - self._rebalanced_at >= every

    def _rebalance(self) -> None:
        """Let planes change hands at constant bytes where routing or prompts have moved on. Where
        steps run on a GPU the trade is looked for beside them, and begun at a later safe point.
        """
        self._rebalanced_at = self._turn
        state, most = self._state(hard=False), self._config.transfer_budget_bytes // 4
        if self._thinker is not None:
            self._sought = self._thinker.submit(_find_trade, state, most)
        else:
            self._trade(*_find_trade(state, most))

    def _trade(self, trade: Trade | None, seconds: float) -> None:
        """Put a trade on the agenda: each raise behind the reductions that make room for it."""
        self._count_plan(seconds)
        if trade is None:
            return
        downs, room, wanted = deque(trade.down.moves), 0, trade.down.bytes // self._page_bytes
        for move in trade.up.moves:
            needed = self._table.raise_pages(move.block, move.to_bits)
            while downs and room < needed:
                room += downs[0].bytes // self._page_bytes
                self._agenda.append((downs.popleft(), REBALANCE))
            room -= needed
            self._agenda.append((move, REBALANCE))
        self._agenda.extend((move, REBALANCE) for move in downs)
        self._trading = True
        begun, later = self._begin_planned(0), [move for move, _ in self._agenda]
        if moves := (*begun, *later):
            given = sum(move.bytes for move in moves if move.to_bits < move.from_bits)
            self._note_plan(REBALANCE, moves, given // self._page_bytes, wanted, later)

    def _start_raise(self, move: Move, reason: str, keep: int = 0) -> bool:
        """Start a raise if its pages are free, and so many besides."""
        if self._table.raise_pages(move.block, move.to_bits) + keep > self._pool.free_count:
            return False
        self._begin_raise(move.block, move.to_bits, move.damage, reason)
        self._raised_at[move.block] = self._turn
        return True

    def _forget_plans(self) -> None:
        self._agenda.clear()
        self._reserve.clear()
        self._sought, self._trading = None, False

    def _recall(self, reason: str) -> int:
        """Take back the pages of raises under way."""
        if not self._table.in_transfer:
            return 0
        for index in list(self._table.in_transfer):
            self._cancel_raise(index, reason)
        free = self._pool.free_count
        self._land([*self._landed, *self._mover.drop()], reason)
        self._landed.clear()
        self._pressure.note_release(self._turn)
        return self._pool.free_count - free


def _find_trade(state: PlannerState, bytes_at_most: int) -> tuple[Trade | None, float]:
    """A trade, if one is worth it, and the seconds that it took to know."""
    started = time.perf_counter()
    trade = rebalance(state, bytes_at_most)
    return trade, time.perf_counter() - started
