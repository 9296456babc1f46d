"""Which whole experts each rank holds. Arithmetic on what the artifact knows of the routing.

A step waits for the rank that reads most. Experts that share a width, one on each rank, are
neighbours in the order of their router weight, so that every rank gets busy and idle ones alike.
Which of them goes to which rank is free: experts that the same tokens choose are kept apart, so
that the few experts of a small batch do not meet on one rank.

Axes: L MoE layers, E experts of the model, e experts of a rank, R ranks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_SWEEPS = 16  # over all experts of a layer; a few are enough


def place_experts(
    mass: NDArray[np.floating], size: int, pairs: NDArray[np.integer] | None = None
) -> NDArray[np.int64]:
    """Which experts the ranks hold: [L, e, R]; those of a row share their widths.

    Args:
        mass: [L, E] router weight that each expert got offline, in any unit.
        size: R.
        pairs: [L, E, E] tokens that went to both of two experts, if that was counted.
    """
    layers, experts = mass.shape
    order = np.argsort(-np.nan_to_num(mass), axis=1, kind="stable")
    placed = order.reshape(layers, experts // size, size)
    placed[:, 1::2] = placed[:, 1::2, ::-1]  # the busiest of a group is not always on rank 0
    if pairs is not None:
        for slot in range(layers):
            _keep_apart(placed[slot], pairs[slot].astype(np.float64))
    return placed


def _keep_apart(placed: NDArray[np.int64], pairs: NDArray[np.float64]) -> None:
    """Exchange experts of a row, in place, as long as fewer tokens have two experts on one rank.

    Args:
        placed: [e, R].
        pairs: [E, E], symmetric; the diagonal does not count. Overwritten.
    """
    np.fill_diagonal(pairs, 0)
    beside = np.stack([pairs[:, held].sum(1) for held in placed.T], 1)  # [E, R] met on each rank
    for _ in range(_SWEEPS):
        changed = False
        for row in placed:
            met = beside[row]  # [R, R] of the expert on each rank, on each rank
            own = np.diagonal(met)
            # Two that change places no longer meet their ranks, nor each other.
            fewer = own[:, None] + own[None] - met - met.T + 2 * pairs[np.ix_(row, row)]
            first, second = np.unravel_index(np.argmax(fewer), fewer.shape)
            if fewer[first, second] <= 0:
                continue
            one, other = row[first], row[second]
            moved = pairs[:, one] - pairs[:, other]
            beside[:, second] += moved
            beside[:, first] -= moved
            row[first], row[second] = other, one
            changed = True
        if not changed:
            return
