"""The steps that every block could take in one direction, and their marginal prices.

A ladder lists, for each block, the points (bytes moved, change of damage) from its committed width
to its last allowed width. Knows no routing and no policy: `pw.planning.planner` walks on it.

Axes: W rungs (widths in walking order), n blocks. Rung 0 is the widest width on the way down and
the narrowest on the way up; rungs outside a block's range repeat its nearest end, so that they
move nothing.

Marginal prices are the slopes of the lower convex hull of a block's points (DESIGN section 7). A
block's costs are whole pages and its damage is measured, so the raw points need not be convex. The
hull comes from the max-min formula of isotonic regression (Barlow et al. 1972),

    slope[k] = max over i <= k of min over j > k of (y_j - y_i) / (x_j - x_i),

which is vectorised over blocks and never decreases in k, in floating point too: the maximum grows
and the minimum loses members. Taking steps in slope order thus takes each block's in rung order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


def hull_slopes(x: FloatArray, y: FloatArray, empty: float) -> FloatArray:
    """Slope of the lower convex hull over each interval between neighbouring rungs.

    Args:
        x: [W, n] bytes, never falling along W.
        y: [W, n] damage.
        empty: Slope of a pair of points that are not apart in x: `inf` where a step without bytes
            is useless (down), `-inf` where it is free (up).

    Returns:
        [W - 1, n], never falling along W.
    """
    rungs, blocks = x.shape
    slopes = np.full((rungs - 1, blocks), -np.inf)
    for i in range(rungs - 1):
        apart = x[i + 1 :] - x[i]  # [W - 1 - i, n], against every later point
        pair = np.full_like(apart, empty)
        np.divide(y[i + 1 :] - y[i], apart, out=pair, where=apart > 0)
        least = np.minimum.accumulate(pair[::-1], axis=0)[::-1]  # over j > k
        np.maximum(slopes[i:], least, out=slopes[i:])
    return slopes


@dataclass(frozen=True, slots=True)
class Ladder:
    """What each block could do in one direction. Made by `descend` and `climb`."""

    x: FloatArray  # [W, n] bytes moved since the committed width, >= 0, never falling
    y: FloatArray  # [W, n] change of damage since then: >= 0 going down, <= 0 going up
    start: IntArray  # [n] rung of the committed width
    stop: IntArray  # [n] last allowed rung, >= start
    down: bool

    @classmethod
    def descend(
        cls, cost: FloatArray, damage: FloatArray, bits: IntArray, floors: IntArray
    ) -> Ladder:
        """Ladder from each committed width to its floor; a block below its floor stays.

        Args:
            cost: [W, n] bytes at each width, never falling along W.
            damage: [W, n] damage at each width, never rising along W.
            bits: [n] index of the committed width.
            floors: [n] index of the least width.
        """
        top = len(cost) - 1
        start, stop = top - bits, top - np.minimum(floors, bits)
        column = np.arange(len(bits))
        x = cost[bits, column] - cost[::-1]
        y = damage[::-1] - damage[bits, column]
        np.clip(x, 0, x[stop, column], out=x)
        np.clip(y, 0, y[stop, column], out=y)
        return cls(x, y, start, stop, down=True)

    @classmethod
    def climb(cls, cost: FloatArray, damage: FloatArray, bits: IntArray, ceil: IntArray) -> Ladder:
        """Ladder from each committed width to its ceiling; arguments as of `descend`."""
        start, stop = bits, np.maximum(ceil, bits)
        column = np.arange(len(bits))
        x = cost - cost[bits, column]
        y = damage - damage[bits, column]
        np.clip(x, 0, x[stop, column], out=x)
        np.clip(y, y[stop, column], 0, out=y)
        return cls(x, y, start, stop, down=False)

    def slopes(self) -> FloatArray:
        """[W - 1, n] damage per byte of each step; `inf` where a block has no such step."""
        slopes = hull_slopes(self.x, self.y, np.inf if self.down else -np.inf)
        rung = np.arange(len(slopes))[:, None]
        return np.where((rung >= self.start) & (rung < self.stop), slopes, np.inf)

    def at(self, rungs: IntArray) -> tuple[FloatArray, FloatArray]:
        """Bytes and damage [n] of every block at one rung each."""
        column = np.arange(len(rungs))
        return self.x[rungs, column], self.y[rungs, column]

    def width_index(self, rungs: IntArray) -> IntArray:
        """Index [n] of the width that each rung stands for."""
        return len(self.x) - 1 - rungs if self.down else rungs


@dataclass(frozen=True, slots=True)
class Steps:
    """Hull steps of all blocks, cheapest first. Equal prices go by block index, then by rung."""

    block: IntArray  # [S]
    rung: IntArray  # [S] the step goes from this rung to the next
    slope: FloatArray  # [S] ascending
    x: FloatArray  # [S] bytes of the step
    y: FloatArray  # [S] damage of the step

    @classmethod
    def of(cls, ladder: Ladder, slopes: FloatArray) -> Steps:
        """Sort the steps whose slope is not `inf`."""
        flat = slopes.T.ravel()  # block-major: a tie keeps block order, and rung order within one
        wanted = np.flatnonzero(flat < np.inf)
        chosen = wanted[_stable_argsort(flat[wanted])]
        block, rung = np.divmod(chosen, len(slopes))
        return cls(
            block,
            rung,
            flat[chosen],
            ladder.x[rung + 1, block] - ladder.x[rung, block],
            ladder.y[rung + 1, block] - ladder.y[rung, block],
        )

    def only(self, keep: BoolArray | IntArray | slice) -> Steps:
        """A subset, or another order."""
        return Steps(
            self.block[keep], self.rung[keep], self.slope[keep], self.x[keep], self.y[keep]
        )

    def whole(self, count: int) -> int:
        """Largest number <= `count` of leading steps that leaves no block between two vertices of
        its hull: a run of equal slopes within one block is one jump.
        """
        if count >= len(self.block):
            return len(self.block)
        while (
            count > 0
            and self.block[count] == self.block[count - 1]
            and self.slope[count] == self.slope[count - 1]
        ):
            count -= 1
        return count


def _stable_argsort(values: FloatArray) -> IntArray:
    """`np.argsort(values, kind="stable")` by two vectorised sorts, several times faster."""
    order = np.argsort(values)
    ordered = values[order]
    rank = np.zeros(len(values), dtype=np.int64)
    np.cumsum(ordered[1:] != ordered[:-1], out=rank[1:])
    return np.asarray(np.sort(rank * len(values) + order) % max(len(values), 1))
