"""Reductions that a plan has found beyond the need, kept in order for the steps that follow.

Under pressure each step needs some pages, and a plan takes the host as long as a step the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container

import numpy as np
from numpy.typing import NDArray

from pw.planning.planner import Move, Plan, PlannerState, in_steps

_TURNS = 64  # in which a plan is made use of


class Reserve:
    """Steps of a plan, best price first."""

    def __init__(self) -> None:
        self._steps: deque[Move] = deque()
        self._turn = 0

    def fill(self, state: PlannerState, found: Plan, turn: int) -> None:
        """Keep a plan that was made from a state at a turn, in place of what was kept."""
        self._steps, self._turn = deque(in_steps(state, found)), turn

    def clear(self) -> None:
        """Forget it."""
        self._steps.clear()

    def lasts(self, turn: int) -> bool:
        """Whether something is left of a plan that is not too old."""
        return bool(self._steps) and turn - self._turn <= _TURNS

    def take(
        self,
        num_bytes: int,
        committed: NDArray[np.int64],  # [n] bits
        moving: Container[int],  # blocks
        least: int,  # bits
    ) -> list[Move]:
        """Take out steps that still hold and release so many bytes; those of a block are one move.

        Less, and all that holds, where there is not so much.
        """
        chosen: dict[int, Move] = {}
        while self._steps and num_bytes > 0:
            step = self._steps.popleft()
            before = chosen.get(step.block)
            bits = committed[step.block] if before is None else before.to_bits
            if bits != step.from_bits or step.to_bits < least or step.block in moving:
                continue
            num_bytes -= step.bytes
            if before is not None:
                size, damage = before.bytes + step.bytes, before.damage + step.damage
                step = Move(step.block, before.from_bits, step.to_bits, size, damage)
            chosen[step.block] = step
        return list(chosen.values())
