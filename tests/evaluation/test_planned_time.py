"""Planned widths at equal bytes: their time by count, and what less of it would cost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pw.evaluation.bench.planned_time import Blocks, blocks_of, plan, table, widest_of

CONFIG = Path(__file__).parents[2] / "pipelines" / "recipes" / "configs" / "mixtral-8x7b.json"


def small() -> Blocks:
    widths = np.array([2, 3, 4])
    damage = np.array([[8.0, 2.0, 0.0], [1.0, 0.25, 0.0]])
    sizes = np.tile(np.array([2.0, 3.0, 4.0]), (2, 1))
    return Blocks(widths, sizes, damage, np.tile(np.array([0.9, 1.0, 1.4]), (2, 1)))


def test_a_plan_has_least_damage_in_its_bytes() -> None:
    line = plan(small(), 6.0, 0.0)
    assert (line.damage, line.counts) == (1.0, [1, 0, 1])
    assert line.time == pytest.approx(2.3)


def test_time_that_costs_enough_makes_widths_uniform() -> None:
    line = plan(small(), 6.0, 5.0)
    assert (line.damage, line.counts) == (2.25, [0, 2, 0])
    assert line.time == pytest.approx(2.0)


def test_the_widest_of_some_blocks_by_hand() -> None:
    assert widest_of([1, 1], [10.0, 20.0], 1) == pytest.approx(15)
    assert widest_of([1, 1], [10.0, 20.0], 2) == pytest.approx(17.5)  # 3 of 4 pairs have a wide one
    assert widest_of([0, 5], [10.0, 20.0], 4) == pytest.approx(20)


def test_blocks_have_the_shape_of_a_config() -> None:
    blocks = blocks_of(CONFIG, {2: 80.0, 4: 120.0, 8: 240.0})
    assert blocks.sizes.shape == (32 * 8 * 2, 7)
    assert blocks.time.sum(0) == pytest.approx([80, 100, 120, 150, 180, 210, 240])
    assert not blocks.damage[:, -1].any()
    head, _, first, *rest = table(blocks, 3).splitlines()
    assert "damage over uniform 3" in head
    assert "| 1.000 |" in first  # of its own win
    assert len(rest) == 4
