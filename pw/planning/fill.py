"""The integral end of a plan: what to do with the bytes that no whole hull step matches.

Works on ladders and rungs (`pw.planning.ladder`). Each loop takes the best single jump of any
block, hull vertex or not, and updates that block alone: O(W n) per jump, few jumps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pw.planning.ladder import BoolArray, FloatArray, IntArray, Ladder

_CORE = 96  # jumps of each kind that an exchange looks at
_EXCHANGES = 3
_NOISE = 1e-12  # relative; below it a difference of sums is rounding


@dataclass(frozen=True, slots=True)
class LayerRoom:
    """How far each layer may still fall (the per-layer floor of pitfall 28)."""

    widths: IntArray  # [W] bits of each rung
    layer: IntArray  # [n] layer slot of each block
    least: FloatArray  # [L] least sum of bits over a layer's blocks

    def spare(self, rungs: IntArray) -> FloatArray:
        """Bits [L] that each layer may still lose."""
        held = np.bincount(self.layer, self.widths[rungs], minlength=len(self.least))
        return np.asarray(np.maximum(held - self.least, 0.0))

    def reach(self, rungs: IntArray) -> BoolArray:
        """Rungs [W, n] that each block may go to, alone, within its layer's room."""
        drop = self.widths[rungs] - self.widths[:, None]
        return np.asarray(drop <= self.spare(rungs)[self.layer])

    def admits(self, rungs: IntArray, block: IntArray, drop: IntArray) -> BoolArray:
        """Which steps [S], taken in order from `rungs`, are within their layer's room: a leading
        part of each layer's. `drop` [S] is the bits that a step removes from `block` [S].
        """
        layer = self.layer[block]
        by_layer = np.argsort(layer, kind="stable")
        total = np.cumsum(drop[by_layer])
        first = np.searchsorted(layer[by_layer], np.arange(len(self.least)))
        before = np.concatenate(([0], total))[first]  # [L]
        admitted = np.empty(len(layer), dtype=np.bool_)
        group = layer[by_layer]
        admitted[by_layer] = total - before[group] <= self.spare(rungs)[group]
        return admitted


def fill_target(ladder: Ladder, rungs: IntArray, target: int, room: LayerRoom | None) -> IntArray:
    """Go on down from hull vertices until `target` bytes are released, with least damage.

    Before each jump the one that would end the plan is noted; jumps by price go on until that
    ending cannot get cheaper. The cheapest ending wins.

    Returns:
        Rungs [n]; when nothing reaches the target, as far down as the ladder and `room` allow.
    """
    walk = _Walk(ladder, rungs)
    missing = float(target - walk.at_x.sum())
    if missing <= 0:
        return rungs
    spent, cheapest = 0.0, np.inf
    jumps: list[tuple[int, int]] = []
    ending: tuple[int, tuple[int, int]] | None = None  # jumps before it, and the jump itself
    while True:
        allowed = walk.forward if room is None else walk.forward & room.reach(walk.rungs)
        last, harm = _least(walk.dy, allowed & (walk.dx >= missing))
        if spent + harm < cheapest:
            cheapest, ending = spent + harm, (len(jumps), last)
        step, price = _least(walk.price, allowed & (walk.dx < missing))
        if price == np.inf or spent + walk.dy[step] >= cheapest:
            break
        spent += float(walk.dy[step])
        missing -= float(walk.dx[step])
        jumps.append(step)
        walk.jump(step)
    if ending is not None:
        jumps = [*jumps[: ending[0]], ending[1]]
    result = rungs.copy()
    for rung, block in jumps:
        result[block] = rung
    return result


def refund(ladder: Ladder, rungs: IntArray, target: int) -> IntArray:
    """Undo jumps, most damage first, while the release stays at or above `target`."""
    result = rungs.copy()
    at_x, at_y = ladder.at(rungs)
    spare = float(at_x.sum() - target)
    if spare <= 0:
        return result
    back_one, _ = ladder.at(np.maximum(rungs - 1, 0))
    near = np.flatnonzero((rungs > ladder.start) & (at_x - back_one <= spare))
    rung = np.arange(len(ladder.x))[:, None]
    x, y, at_x, at_y = ladder.x[:, near], ladder.y[:, near], at_x[near], at_y[near]
    while len(near):
        back = (rung < result[near]) & (at_x - x <= spare)  # rungs before the start move nothing
        saved = np.where(back, at_y - y, 0.0)
        best, column = np.unravel_index(int(saved.argmax()), saved.shape)
        if saved[best, column] <= 0:
            break
        spare -= float(at_x[column] - x[best, column])
        at_x[column], at_y[column] = x[best, column], y[best, column]
        result[near[column]] = max(best, ladder.start[near[column]])
    return result


def exchange(ladder: Ladder, rungs: IntArray, target: int, room: LayerRoom | None) -> IntArray:
    """Undo a jump of one block for a jump of another where that lowers the damage and keeps the
    release at or above `target`; best pair first, among the best-priced of each kind.
    """
    for _ in range(_EXCHANGES):
        walk = _Walk(ladder, rungs)
        spare = walk.at_x.sum() - target
        allowed = walk.forward if room is None else walk.forward & room.reach(rungs)
        ahead = _best_priced(np.where(allowed, walk.price, np.inf))
        rung = np.arange(len(ladder.x))[:, None]
        back = (rung >= ladder.start) & (rung < rungs) & (walk.dy < 0)
        worth = np.divide(walk.dy, -walk.dx, out=np.full_like(walk.dx, -np.inf), where=walk.dx < 0)
        undo = _best_priced(np.where(back, worth, np.inf))
        harm = walk.dy[ahead][:, None] + walk.dy[undo]
        legal = (walk.dx[ahead][:, None] + walk.dx[undo] >= -spare) & (ahead[1][:, None] != undo[1])
        change = np.where(legal, harm, 0.0)
        if not change.size or change.min() >= -_NOISE * walk.at_y.sum():
            break
        jump, undone = np.unravel_index(int(change.argmin()), change.shape)
        rungs = rungs.copy()
        rungs[undo[1][undone]] = undo[0][undone]
        rungs[ahead[1][jump]] = ahead[0][jump]
    return rungs


def fill_budget(ladder: Ladder, rungs: IntArray, budget: int) -> IntArray:
    """Go on up while single jumps fit into what is left of `budget`, best price first."""
    walk = _Walk(ladder, rungs)
    left = float(budget - walk.at_x.sum())
    while True:
        step, price = _least(walk.price, walk.forward & (walk.dx <= left))
        if price == np.inf:
            return walk.rungs
        left -= float(walk.dx[step])
        walk.jump(step)


class _Walk:
    """Jumps ahead of every block: bytes, damage and price from its present rung."""

    def __init__(self, ladder: Ladder, rungs: IntArray) -> None:
        self.ladder, self.rungs = ladder, rungs.copy()
        self.at_x, self.at_y = ladder.at(rungs)
        self.dx = ladder.x - self.at_x
        self.dy = ladder.y - self.at_y
        rung = np.arange(len(ladder.x))[:, None]
        self.forward = (rung > rungs) & (rung <= ladder.stop)
        if ladder.down:
            self.forward &= self.dx > 0  # a reduction that releases nothing is useless
        self.still = np.inf if ladder.down else -np.inf  # price of a jump that moves no bytes
        self.price = np.full_like(self.dx, self.still)
        np.divide(self.dy, self.dx, out=self.price, where=self.dx > 0)

    def jump(self, step: tuple[int, int]) -> None:
        """Move one block to a rung ahead."""
        rung, block = step
        ladder = self.ladder
        self.rungs[block] = rung
        self.dx[:, block] = ladder.x[:, block] - ladder.x[rung, block]
        self.dy[:, block] = ladder.y[:, block] - ladder.y[rung, block]
        self.forward[: rung + 1, block] = False
        apart = self.dx[:, block] > 0
        if ladder.down:
            self.forward[:, block] &= apart
        self.price[:, block] = self.still
        self.price[apart, block] = self.dy[apart, block] / self.dx[apart, block]


def _least(values: FloatArray, allowed: BoolArray) -> tuple[tuple[int, int], float]:
    """Position (rung, block) and value of the least allowed entry; `inf` if none is allowed."""
    masked = np.where(allowed, values, np.inf)
    rung, block = divmod(int(masked.argmin()), masked.shape[1])
    return (rung, block), float(masked[rung, block])


def _best_priced(prices: FloatArray) -> tuple[IntArray, IntArray]:
    """Rungs and blocks of the `_CORE` least entries that are not `inf`."""
    flat = prices.ravel()
    best = np.argpartition(flat, _CORE)[:_CORE] if len(flat) > _CORE else np.arange(len(flat))
    rung, block = np.divmod(np.sort(best[flat[best] < np.inf]), prices.shape[1])
    return rung, block
