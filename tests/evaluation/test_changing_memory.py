"""The simulated arena: no page is spent twice, work is counted, policies move as they should."""

from __future__ import annotations

import numpy as np
import pytest

from pw.config import PlannerConfig
from pw.evaluation.lab.changing_memory import Arena, FixedWeights, MovingWeights, Request
from pw.planning.planner import PlannerState

PAGE = 1024
COSTS = np.tile(np.array([[2, 4, 6]], dtype=np.int64) * PAGE, (8, 1))  # 16, 32, 48 pages in all
CONFIG = PlannerConfig(dwell_steps=4, low_watermark=0.02, high_watermark=0.05)


def state() -> PlannerState:
    ones = np.ones(8, dtype=np.int64)
    damage = np.outer(np.arange(1, 9), [4.0, 1.0, 0.0])
    return PlannerState(np.array([2, 3, 4]), 4 * ones, 2 * ones, 4 * ones, COSTS, damage)


def kv_pages(tokens: int) -> int:
    return -(-tokens // 4)


class Watched(MovingWeights):
    """Remembers every total of pages it was asked about."""

    def safe_point(self, step: int, free: int, forecast: int) -> None:
        assert free >= 0
        super().safe_point(step, free, forecast)


LOAD = [Request(0, 20, 60), Request(0, 20, 60), Request(300, 4, 8)]  # 20 pages each at their end


def test_moving_weights_give_way_and_come_back() -> None:
    weights = Watched(state(), PAGE, 64, CONFIG)
    outcome = Arena(64, kv_pages, weights, 4, 4).serve(LOAD)
    assert outcome.preemptions == outcome.recomputed == 0
    assert outcome.prefilled == 44
    assert outcome.made == 128
    assert len(outcome.delays) == 3
    least = min(bits.sum() for _, bits in outcome.timeline)
    assert least < 32
    assert weights.bits.sum() > least
    assert weights.moved_bytes > 0


def test_what_hurts_least_goes_first_but_uniform_steps_go_together() -> None:
    planned = MovingWeights(state(), PAGE, 64, CONFIG)
    planned.release(4)
    assert planned.bits.tolist() == [3, 3, 4, 4, 4, 4, 4, 4]
    together = MovingWeights(state(), PAGE, 64, CONFIG, uniform=True)
    assert together.release(4) == 16
    assert together.bits.tolist() == [3] * 8
    assert together.reductions == 8


def test_weights_that_do_not_move_cost_work() -> None:
    outcome = Arena(64, kv_pages, FixedWeights(np.full(8, 4), 32), 4, 4).serve(LOAD)
    assert outcome.preemptions > 0
    assert outcome.recomputed > 0
    assert outcome.made == 128
    with pytest.raises(ValueError, match="does not hold"):
        Arena(64, kv_pages, FixedWeights(np.full(8, 4), 60), 4, 4).serve(LOAD)


def test_a_timeline_is_cut_by_tokens_not_by_steps() -> None:
    weights = MovingWeights(state(), PAGE, 64, CONFIG)
    outcome = Arena(64, kv_pages, weights, 4, 4).serve(LOAD)
    parts = outcome.allocations(64)
    assert len(parts) == 64
    assert (parts[0] == outcome.timeline[0][1]).all()
    assert (parts[-1] == outcome.timeline[-1][1]).all()
    busy = sum(tokens for tokens, _ in outcome.timeline[:60])
    middle = outcome.allocations(2)[0]
    assert busy > 64  # the first half of the tokens lies in the first 60 steps
    assert any((middle == bits).all() for _, bits in outcome.timeline[:60])
