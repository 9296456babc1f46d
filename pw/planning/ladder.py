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

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

_SAMPLE = 17  # odd, so that a sample meets both modules and all rungs


def pick(table: FloatArray, rows: IntArray) -> FloatArray:
    """Entries [n] of a contiguous table [W, n], one row per column."""
    columns = table.shape[1]
    entries: FloatArray = np.take(table, rows * columns + np.arange(columns))
    return entries


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
        least = pair[-1]
        for k in range(rungs - 2, i - 1, -1):
            least = np.minimum(least, pair[k - i])  # over j > k
            np.maximum(slopes[k], least, out=slopes[k])
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
        x = pick(cost, bits) - cost[::-1]
        y = damage[::-1] - pick(damage, bits)
        np.clip(x, 0, pick(x, stop), out=x)
        np.clip(y, 0, pick(y, stop), out=y)
        return cls(x, y, start, stop, down=True)

    @classmethod
    def climb(cls, cost: FloatArray, damage: FloatArray, bits: IntArray, ceil: IntArray) -> Ladder:
        """Ladder from each committed width to its ceiling; arguments as of `descend`."""
        start, stop = bits, np.maximum(ceil, bits)
        x = cost - pick(cost, bits)
        y = damage - pick(damage, bits)
        np.clip(x, 0, pick(x, stop), out=x)
        np.clip(y, pick(y, stop), 0, out=y)
        return cls(x, y, start, stop, down=False)

    def slopes(self) -> FloatArray:
        """[W - 1, n] damage per byte of each step; `inf` where a block has no such step."""
        slopes = hull_slopes(self.x, self.y, np.inf if self.down else -np.inf)
        rung = np.arange(len(slopes))[:, None]
        return np.where((rung >= self.start) & (rung < self.stop), slopes, np.inf)

    def at(self, rungs: IntArray) -> tuple[FloatArray, FloatArray]:
        """Bytes and damage [n] of every block at one rung each."""
        return pick(self.x, rungs), pick(self.y, rungs)

    def width_index(self, rungs: IntArray) -> IntArray:
        """Index [n] of the width that each rung stands for."""
        return len(self.x) - 1 - rungs if self.down else rungs


@dataclass(frozen=True, slots=True)
class Steps:
    """Hull steps of all blocks, cheapest first. Equal prices go by block index, then by rung.

    Made by `around`, which sorts the steps near a number of bytes only; those that are cheaper in
    any case are `taken`.
    """

    taken: IntArray  # [n] rung of every block before the first step listed here
    block: IntArray  # [S]
    rung: IntArray  # [S] the step goes from this rung to the next
    slope: FloatArray  # [S] ascending
    x: FloatArray  # [S] bytes of the step

    @classmethod
    def around(cls, ladder: Ladder, size: float) -> Steps:
        """Steps in whose course the bytes moved pass `size`; all steps when `size` is `inf`."""
        slopes = ladder.slopes()
        # Block-major, so that a tie keeps block order, and rung order within a block.
        flat, x = slopes.T.ravel(), np.diff(ladder.x, axis=0).T.ravel()
        low, high = _price_band(flat, x, size)
        wanted = np.flatnonzero((flat >= low) & (flat <= high))
        chosen = wanted[_stable_argsort(flat[wanted])]
        block = chosen // len(slopes)
        taken = ladder.start + (slopes < low).sum(axis=0)
        return cls(taken, block, chosen - block * len(slopes), flat[chosen], x[chosen])

    def only(self, keep: BoolArray | IntArray) -> Steps:
        """A subset, or another order."""
        return Steps(self.taken, self.block[keep], self.rung[keep], self.slope[keep], self.x[keep])

    def after(self, count: int) -> IntArray:
        """Rungs [n] after the leading `count` steps, or a few less: no block is left between two
        vertices of its hull (a run of equal slopes within one block is one jump).
        """
        while (
            0 < count < len(self.block)
            and self.block[count] == self.block[count - 1]
            and self.slope[count] == self.slope[count - 1]
        ):
            count -= 1
        return self.taken + np.bincount(self.block[:count], minlength=len(self.taken))


def _stable_argsort(values: FloatArray) -> IntArray:
    """`np.argsort(values, kind="stable")` by one or two vectorised sorts: up to 4 x faster."""
    order = np.argsort(values)
    ordered = values[order]
    differ = ordered[1:] != ordered[:-1]
    if differ.all():
        return order
    rank = np.concatenate(([0], np.cumsum(differ)))
    return np.asarray(np.sort(rank * len(values) + order) % len(values))


def _price_band(slopes: FloatArray, x: FloatArray, size: float) -> tuple[float, float]:
    """Prices between which the cheapest steps' bytes pass `size`: guessed from a sample, checked
    on all steps, as wide as all finite prices where the guess fails.
    """
    low, high = -np.inf, float(np.finfo(np.float64).max)
    if size == np.inf:
        return low, high
    sample = np.arange(0, len(slopes), _SAMPLE)
    sample = sample[slopes[sample] < np.inf]
    sample = sample[np.argsort(slopes[sample])]
    middle = int(np.searchsorted(np.cumsum(x[sample]), size / _SAMPLE))
    margin = 2 * math.isqrt(len(sample)) + 1  # some standard deviations of the guess
    if middle >= margin and len(sample):
        guess = float(slopes[sample[min(middle, len(sample)) - margin]])
        low = guess if x[slopes < guess].sum() < size else low
    if middle + margin < len(sample):
        guess = float(slopes[sample[middle + margin]])
        high = guess if x[slopes <= guess].sum() >= size else high
    return low, high
