"""The widths that a run really had, read back from its precision trace."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pw.blocks import ExpertGeometry
from pw.engine.precision.trace import Replay

_COMMITS = ("reduce", "commit_raise")  # the other transitions change what is under way only


def spread(steps: int, count: int) -> list[int]:
    """`count` steps, each in the middle of its equal share of `steps`; fewer when there are."""
    count = min(count, steps)
    return [(2 * index + 1) * steps // (2 * count) for index in range(count)]


def bits_at(
    replay: Replay, geometry: ExpertGeometry, steps: Sequence[int]
) -> list[NDArray[np.int64]]:
    """Committed bits [n], in geometry order, that the forward pass of each step saw.

    Args:
        replay: The trace.
        geometry: Of the model.
        steps: Ascending.
    """
    bits = np.array(replay.bits, dtype=np.int64)
    changes = iter(sorted(replay.transitions))
    upcoming = next(changes, None)
    snapshots = []
    for step in steps:
        while upcoming is not None and upcoming <= step:
            for transition in replay.transitions[upcoming]:
                if transition.event in _COMMITS:
                    bits[geometry.index(transition.key)] = transition.to_bits
            upcoming = next(changes, None)
        snapshots.append(bits.copy())
    return snapshots
