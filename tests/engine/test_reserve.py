"""Reductions kept for the steps that follow."""

import numpy as np

from pw.engine.precision.reserve import Reserve
from pw.planning.planner import Move, PlannerState, plan


def kept(turn: int = 0) -> Reserve:
    """Two blocks at 4 bits; a plan of all their planes, one page of one byte each."""
    bits, widths = np.array([4, 4]), np.array([2, 3, 4])
    cost = np.array([[2, 3, 4]] * 2)
    damage = np.array([[6.0, 2.0, 0.0], [7.0, 1.0, 0.0]])
    state = PlannerState(widths, bits, np.array([2, 2]), bits, cost, damage)
    reserve = Reserve()
    reserve.fill(state, plan(state, 4), turn)
    return reserve


def test_steps_come_best_price_first_and_those_of_a_block_as_one() -> None:
    reserve, bits = kept(), np.array([4, 4])
    assert reserve.take(1, bits, (), 2) == [Move(1, 4, 3, 1, 1.0)]
    bits[1] = 3
    assert reserve.take(3, bits, (), 2) == [Move(0, 4, 2, 2, 6.0), Move(1, 3, 2, 1, 6.0)]
    assert not reserve.lasts(0)


def test_steps_that_no_longer_hold_are_left_out() -> None:
    assert [m.block for m in kept().take(4, np.array([3, 4]), (), 2)] == [1, 0]
    assert kept().take(4, np.array([2, 4]), (), 2) == [Move(1, 4, 2, 2, 7.0)]
    assert kept().take(4, np.array([4, 4]), {1}, 2) == [Move(0, 4, 2, 2, 6.0)]
    assert kept().take(4, np.array([4, 4]), (), 3) == [Move(1, 4, 3, 1, 1.0), Move(0, 4, 3, 1, 2.0)]


def test_an_old_plan_is_not_made_use_of() -> None:
    reserve = kept(turn=10)
    assert reserve.lasts(74)
    assert not reserve.lasts(75)
    reserve.clear()
    assert not reserve.lasts(10)
