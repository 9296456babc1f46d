"""How long a safe point may take for what no step waits for. Knows no planes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

_SHARE = 1 / 8  # of a step
_STEPS = 8  # of late, of which the shortest counts: prompts between them take longer


class Pace:
    """Time for what no step waits for: a part of what a step takes of late.

    Args:
        clock: Seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._begun: float | None = None  # the last safe point, of an engine that was not idle
        self._until = 0.0

    def begin(self, *, idle: bool) -> None:
        """A safe point begins; that of an idle engine may take any time."""
        now = self._clock()
        if idle:
            self._begun, self._until = None, float("inf")
            return
        if self._begun is not None:
            self._steps.append(now - self._begun)
        self._begun = now
        self._until = now + _SHARE * min(self._steps, default=0.0)

    def is_over(self) -> bool:
        """Whether this safe point has had its time."""
        return self._clock() >= self._until
