"""Which blocks give up or regain which planes: pure functions from a state to a `Plan`.

Touches no device, no clock, no randomness: equal states give equal plans.

    plan         down to a memory target with least damage (DESIGN section 7)
    in_steps     what a plan down does, in an order in which any leading part is a good plan
    plan_greedy  down as in the paper's Algorithm 1, for comparison
    plan_reload  up within a number of bytes, most damage undone first
    allocate     the best static widths for a number of bytes

`plan` takes hull steps of all blocks by damage per byte (`pw.planning.ladder`): optimal for the
relaxed problem, in which the last step may be taken in part. The true last step is filled with
whole planes (`pw.planning.fill`), so that

    plan.bound <= least possible damage <= plan.damage <= plan.bound + damage of one hull step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from pw.config import format_exactly
from pw.errors import BudgetError
from pw.planning.fill import LayerRoom, exchange, fill_budget, fill_target, refund
from pw.planning.ladder import BoolArray, FloatArray, IntArray, Ladder, Steps

_CLOSE = 2e-3  # a plan this near to its lower bound is not improved further


class Move(NamedTuple):
    """One block's change of width, over one or more planes."""

    block: int  # geometry index
    from_bits: int
    to_bits: int
    bytes: int  # released (down) or taken (up), whole pages
    damage: float  # change of predicted damage: >= 0 down, <= 0 up


@dataclass(frozen=True, eq=False)
class Plan:
    """Moves of m blocks in the order in which to make them: best damage per byte first."""

    block: IntArray  # [m] geometry index
    from_bits: IntArray  # [m]
    to_bits: IntArray  # [m]
    move_bytes: IntArray  # [m]
    move_damage: FloatArray  # [m]
    satisfied: bool  # down: the target is met; up: every block reaches its ceiling
    bound: float  # least damage of the relaxed problem (down, satisfied); else `damage`

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """The same, one object per block."""
        columns = (self.block, self.from_bits, self.to_bits, self.move_bytes, self.move_damage)
        return tuple(map(Move._make, zip(*(c.tolist() for c in columns), strict=True)))

    @cached_property
    def bytes(self) -> int:
        """Sum over moves."""
        return int(self.move_bytes.sum())

    @cached_property
    def damage(self) -> float:
        """Sum over moves."""
        return float(self.move_damage.sum())

    def apply(self, bits: IntArray) -> IntArray:
        """Committed bits [n] after all moves."""
        after = bits.copy()
        after[self.block] = self.to_bits
        return after


@dataclass(frozen=True)
class PlannerState:
    """What the planner sees. Damage that rises with width is noise and is levelled upward.

    Raises:
        ValueError: Shapes disagree, a width is not offered, costs fall with width, or a number is
            not finite: bugs of the caller.
    """

    widths: IntArray  # [W] ascending bits
    bits: IntArray  # [n] committed
    floors: IntArray  # [n] least bits; a block below its floor is not moved down
    ceil: IntArray  # [n] most bits
    cost_bytes: IntArray  # [n, W] planes + LUT in whole pages, never falling with width
    damage: FloatArray  # [n, W] predicted damage relative to the widest width, >= 0
    layer_of: IntArray | None = None  # [n] layer slot; None: one layer
    layer_floor: float = 0.0  # least mean bits over the blocks of a layer

    def __post_init__(self) -> None:
        n, W = len(self.bits), len(self.widths)
        shapes = (self.floors.shape, self.ceil.shape, self.cost_bytes.shape, self.damage.shape)
        if shapes != ((n,), (n,), (n, W), (n, W)) or W == 0:
            raise ValueError(f"planner arrays disagree: {n} blocks, {W} widths, shapes {shapes}")
        if (np.diff(self.widths) <= 0).any() or (np.diff(self.cost_bytes, axis=1) < 0).any():
            raise ValueError("widths must ascend and costs must not fall with width")
        if not np.isfinite(self.damage).all():
            raise ValueError("damage must be finite")
        for name in ("bits", "floors", "ceil"):
            if not np.isin(getattr(self, name), self.widths).all():
                raise ValueError(f"{name} must be among the widths {self.widths.tolist()}")

    @property
    def total_bytes(self) -> int:
        """Bytes of all blocks at their committed widths."""
        return int(self.cost_bytes[np.arange(len(self.bits)), self.index(self.bits)].sum())

    def index(self, bits: IntArray) -> IntArray:
        """Positions of `bits` in `widths`."""
        return np.searchsorted(self.widths, bits).astype(np.int64)

    def limited(self, depth: int) -> PlannerState:
        """The same state in which no block may move by more than `depth` bits in one plan."""
        return replace(
            self,
            floors=np.maximum(self.floors, self.widths[self.index(self.bits - depth)]),
            ceil=np.minimum(
                self.ceil,
                self.widths[np.searchsorted(self.widths, self.bits + depth, side="right") - 1],
            ),
        )

    def room(self) -> LayerRoom | None:
        """How far the layers may fall, on a descending ladder; None without a layer floor."""
        if self.layer_floor <= self.widths[0]:
            return None
        layer = np.zeros_like(self.bits) if self.layer_of is None else self.layer_of
        return LayerRoom(
            self.widths[::-1], layer, np.bincount(layer).astype(np.float64) * self.layer_floor
        )

    def transposed(self) -> tuple[FloatArray, FloatArray]:
        """Cost and levelled damage, [W, n] float64 (bytes are exact below 2^53)."""
        damage = self.damage.T.astype(np.float64, order="C")
        for wide in range(len(damage) - 1, 0, -1):
            np.maximum(damage[wide - 1], damage[wide], out=damage[wide - 1])
        return np.ascontiguousarray(self.cost_bytes.T, dtype=np.float64), damage


def plan(
    state: PlannerState,
    target_bytes: int,
    *,
    method: str = "hull",
    protected: BoolArray | None = None,
) -> Plan:
    """Reductions that release at least `target_bytes` with least damage.

    Args:
        state: Blocks, floors, costs, damages.
        target_bytes: Bytes to release; <= 0 gives an empty plan.
        method: "hull", or "greedy" for the paper's Algorithm 1.
        protected: [n] blocks that are spared (say, reloaded a moment ago) unless the target cannot
            be met without them.

    Returns:
        The plan. When the floors do not allow the target, everything that they allow is in it and
        `satisfied` is False: the caller preempts or refuses work.
    """
    if protected is not None and protected.any():
        spared = replace(state, floors=np.where(protected, state.bits, state.floors))
        first = plan(spared, target_bytes, method=method)
        if first.satisfied:
            return first
    if target_bytes <= 0:
        none = np.zeros(0, dtype=np.int64)
        return Plan(none, none, none, none, none.astype(np.float64), True, 0.0)
    if method == "greedy":
        return plan_greedy(state, target_bytes)
    return _plan_hull(state, target_bytes)


def in_steps(state: PlannerState, found: Plan) -> list[Move]:
    """The moves of a plan down, cut into the steps of each block's hull, best price first.

    Any leading part of them is nearly the plan for its bytes; a block may be in it several times,
    in order.
    """
    cost, damage = (values[:, found.block] for values in state.transposed())
    start, stop = state.index(found.from_bits), state.index(found.to_bits)
    ladder = Ladder.descend(np.ascontiguousarray(cost), np.ascontiguousarray(damage), start, stop)
    steps = Steps.around(ladder, np.inf)
    apart = (np.diff(steps.block) != 0) | (np.diff(steps.slope) != 0)  # else between two vertices
    first, last = np.ones((2, len(steps.block)), dtype=np.bool_)
    first[1:] = last[:-1] = apart
    block, before, after = steps.block[first], steps.rung[first], steps.rung[last] + 1
    x, y = (values[after, block] - values[before, block] for values in (ladder.x, ladder.y))
    widths = state.widths[::-1]
    columns = (found.block[block], widths[before], widths[after], x.astype(np.int64), y)
    return list(map(Move._make, zip(*(c.tolist() for c in columns), strict=True)))


def _plan_hull(state: PlannerState, target_bytes: int) -> Plan:
    cost, damage = state.transposed()
    ladder = Ladder.descend(cost, damage, state.index(state.bits), state.index(state.floors))
    room = state.room()
    steps = Steps.around(ladder, target_bytes if room is None else np.inf)
    before, hull_damage = (float(values.sum()) for values in ladder.at(steps.taken))
    bound = _relaxed_damage(steps, target_bytes - before)
    if room is not None:
        drop = -np.diff(room.widths)[steps.rung]
        steps = steps.only(room.admits(ladder.start, steps.block, drop))
    rungs = steps.after(int(np.searchsorted(np.cumsum(steps.x), target_bytes - before)))
    rungs = fill_target(ladder, rungs, target_bytes, room)
    rungs = refund(ladder, rungs, target_bytes)
    if bound is not None and ladder.at(rungs)[1].sum() > (hull_damage + bound) * (1 + _CLOSE):
        rungs = exchange(ladder, rungs, target_bytes, room)
        rungs = refund(ladder, rungs, target_bytes)
    return _finish(
        state, ladder, rungs, target_bytes, None if bound is None else hull_damage + bound
    )


def _relaxed_damage(steps: Steps, size: float) -> float | None:
    """Damage of `size` bytes when hull steps are divisible; None if there are not that many."""
    released = np.cumsum(steps.x)
    k = int(np.searchsorted(released, size))
    if k == len(released):
        return None
    part = size - (released[k] - steps.x[k])
    return float((steps.slope[:k] * steps.x[:k]).sum() + steps.slope[k] * part)


def plan_greedy(state: PlannerState, target_bytes: int) -> Plan:
    """The paper's Algorithm 1 (ALGORITHMS 1.3): list every legal reduction b -> b', sort by damage
    per byte, take at most one action per block until the target is met.

    A block's first action in that list is the one with its least ratio, so the list is a minimum
    per block and one sort. Overshoots, and may fall short of a target that `plan` meets.
    """
    cost, damage = state.transposed()
    ladder = Ladder.descend(cost, damage, state.index(state.bits), state.index(state.floors))
    ratio = np.full_like(ladder.x, np.inf)
    np.divide(ladder.y, ladder.x, out=ratio, where=ladder.x > 0)
    best, column = ratio.argmin(axis=0), np.arange(len(state.bits))
    order = np.argsort(ratio[best, column], kind="stable")
    order = order[ratio[best, column][order] < np.inf]
    room = state.room()
    if room is not None:
        drop = state.bits - room.widths[best]
        order = order[room.admits(ladder.start, order, drop[order])]
    released = np.cumsum(ladder.x[best[order], order])
    taken = order[: int(np.searchsorted(released, target_bytes)) + 1]
    rungs = ladder.start.copy()
    rungs[taken] = best[taken]
    return _finish(state, ladder, rungs, target_bytes, None)


def plan_reload(state: PlannerState, budget_bytes: int) -> Plan:
    """Raises that take at most `budget_bytes`, most damage undone per byte first.

    Blocks below their floor (an expert that became hot) come first, up to the floor. Blocks whose
    damage does not change are raised last, so that all return to their ceiling when bytes allow.
    """
    cost, damage = state.transposed()
    ladder = Ladder.climb(cost, damage, state.index(state.bits), state.index(state.ceil))
    budget = max(budget_bytes, 0)
    wanted = np.minimum(state.floors, state.ceil)
    below = bool((state.bits < wanted).any())
    steps = Steps.around(ladder, np.inf if below else budget)
    if below:
        urgent = steps.rung < state.index(wanted)[steps.block]
        steps = steps.only(np.argsort(~urgent, kind="stable"))
    left = budget - ladder.at(steps.taken)[0].sum()
    rungs = steps.after(int(np.searchsorted(np.cumsum(steps.x), left, side="right")))
    rungs = fill_budget(ladder, rungs, budget)
    return _finish(state, ladder, rungs, 0, None)


def allocate(state: PlannerState, budget_bytes: int) -> IntArray:
    """Best static widths [n] between floors and ceilings whose bytes fit the budget.

    Raises:
        BudgetError: The floors alone need more.
    """
    top = replace(state, bits=state.ceil)
    down = plan(top, top.total_bytes - budget_bytes)
    if not down.satisfied:
        raise BudgetError(
            f"experts need {format_exactly(int(top.total_bytes - down.bytes))} at their least "
            f"widths, but {format_exactly(int(budget_bytes))} are allowed",
            "raise the memory budget or lower the bit floors",
        )
    return down.apply(top.bits)


def _finish(
    state: PlannerState, ladder: Ladder, rungs: IntArray, target_bytes: int, bound: float | None
) -> Plan:
    moved = np.flatnonzero(rungs != ladder.start)
    x, y = (values[moved] for values in ladder.at(rungs))
    with np.errstate(divide="ignore", invalid="ignore"):
        price = np.where(x > 0, y / x, -np.inf)
    order = np.argsort(price, kind="stable")
    moved, x, y = moved[order], x[order], y[order]
    after = state.widths[ladder.width_index(rungs)]
    satisfied = x.sum() >= target_bytes if ladder.down else (after >= state.ceil).all()
    return Plan(
        moved,
        state.bits[moved],
        after[moved],
        x.astype(np.int64),
        y,
        bool(satisfied),
        float(y.sum()) if bound is None else bound,
    )
