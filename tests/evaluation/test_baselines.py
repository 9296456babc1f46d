"""Opponents: budgets kept, optima optimal, controls that know what they may know and no more."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from pw.blocks import BlockShape, ExpertGeometry
from pw.errors import BudgetError
from pw.evaluation.baselines.controls import frequency_damage, shuffled
from pw.evaluation.baselines.static import exact, hull
from pw.evaluation.baselines.uniform import stepped, uniform

WIDTHS = range(2, 5)
GEOMETRY = ExpertGeometry((0, 1), 2, 1, BlockShape(8, 32), BlockShape(32, 4))


def spent(costs: np.ndarray, bits: np.ndarray) -> int:
    return int(costs[np.arange(len(bits)), bits - WIDTHS[0]].sum())


@pytest.fixture
def table() -> tuple[np.ndarray, np.ndarray]:
    """Damage that falls by no law, and costs of two kinds of block: [6, 3] each."""
    rng = np.random.default_rng(1)
    damage = np.cumsum(rng.exponential(size=(6, 3)), axis=1)[:, ::-1]
    costs = np.tile([[4, 6, 9], [2, 3, 5]], (3, 1))
    return damage, costs


@pytest.mark.parametrize("budget", [18, 21, 27, 33, 42])
def test_the_integer_program_finds_the_best_of_all(
    table: tuple[np.ndarray, np.ndarray], budget: int
) -> None:
    damage, costs = table
    everything = [np.array(bits) for bits in product(WIDTHS, repeat=6)]
    fitting = [bits for bits in everything if spent(costs, bits) <= budget]
    best = min(damage[np.arange(6), bits - 2].sum() for bits in fitting)
    found = exact(damage, costs, WIDTHS, budget)
    assert spent(costs, found) <= budget
    assert damage[np.arange(6), found - 2].sum() == pytest.approx(best)
    planned = hull(damage, costs, WIDTHS, budget)
    assert spent(costs, planned) <= budget
    assert damage[np.arange(6), planned - 2].sum() >= best - 1e-9


def test_layers_with_equal_shares_cannot_trade(table: tuple[np.ndarray, np.ndarray]) -> None:
    damage, costs = table
    layer_of = np.array([0, 0, 1, 1, 2, 2])
    damage = damage * np.repeat([100.0, 1.0, 1.0], 2)[:, None]  # the first layer wants all
    free = exact(damage, costs, WIDTHS, 27)
    bound = exact(damage, costs, WIDTHS, 27, layer_of)
    for layer in range(3):
        mine = layer_of == layer
        assert spent(costs[mine], bound[mine]) <= 9
    assert spent(costs[:2], free[:2]) > 9


def test_a_budget_below_the_narrowest_widths_is_refused(
    table: tuple[np.ndarray, np.ndarray],
) -> None:
    damage, costs = table
    for refuse in (
        lambda: exact(damage, costs, WIDTHS, 17),
        lambda: hull(damage, costs, WIDTHS, 17),
        lambda: stepped(costs, WIDTHS, 17),
    ):
        with pytest.raises(BudgetError):
            refuse()


def test_uniform_steps_take_no_more_than_one_bit_and_use_the_budget(
    table: tuple[np.ndarray, np.ndarray],
) -> None:
    _, costs = table
    assert (stepped(costs, WIDTHS, 18) == uniform(6, 2)).all()
    assert (stepped(costs, WIDTHS, 27) == uniform(6, 3)).all()
    between = stepped(costs, WIDTHS, 23, seed=4)
    assert set(between.tolist()) == {2, 3}
    left = 23 - spent(costs, between)
    assert 0 <= left < (costs[:, 1] - costs[:, 0])[between == 2].min()
    assert (stepped(costs, WIDTHS, 20, seed=None) == [3, 2, 2, 2, 2, 2]).all()
    assert (stepped(costs, WIDTHS, 1000) == 4).all()


def test_frequency_knows_mass_and_size_alone() -> None:
    damage = frequency_damage(GEOMETRY, np.array([[3.0, 1.0], [2.0, 2.0]]), WIDTHS)
    assert damage.shape == (8, 3)
    np.testing.assert_allclose(damage[0] / damage[2], 3.0)  # gate_up of two experts of a layer
    np.testing.assert_allclose(damage[:, 0] / damage[:, 1], 4.0)
    np.testing.assert_allclose(damage[0] / damage[1], 2.0)  # gate_up has twice the weights


def test_shuffled_widths_cost_the_same_bytes() -> None:
    bits = np.array([2, 3, 4, 3, 2, 4, 4, 2])
    dealt = shuffled(bits, 0)
    assert (dealt != bits).any()
    for module in (0, 1):
        assert sorted(dealt[module::2]) == sorted(bits[module::2])
