import numpy as np
import pytest

from pw.blocks import BlockShape, ExpertGeometry
from pw.config import PlannerConfig
from pw.errors import StoreError
from pw.planning.damage import DamageModel, transition_costs
from pw.planning.planner import plan
from pw.planning.table import BlockTable, fill_unmeasured
from pw.store.tables import Table

GEOMETRY = ExpertGeometry((0, 2), 4, 2, BlockShape(8, 4), BlockShape(4, 4))
WIDTHS = np.array([2, 3, 4])
MASS = np.array([[0.6, 0.3, 0.09, 0.01], [0.25] * 4])  # hot, warm, cold, cold; all warm


def sensitivity(seed=0, widths=(2, 3, 4, 5)):
    scores = np.random.default_rng(seed).exponential(1, (2, 4, 2, 1)) * 4.0 ** -np.array(widths)
    return Table({"output_gradient": scores, "hessian": 1e6 * scores}, {"widths": list(widths)})


def block_table(found=None, metric="output_gradient"):
    cost = np.tile(np.array([4096, 8192, 12288]), (16, 1))
    return BlockTable.from_artifact(found or sensitivity(), metric, GEOMETRY, cost, WIDTHS)


def test_damage_is_multiplier_times_eta_times_transition_cost():
    table = block_table()
    eta = np.random.default_rng(1).uniform(0.5, 2, (2, 4, 2))
    damage = DamageModel(table, PlannerConfig()).damage(MASS, eta)
    for (layer, expert), multiplier in {(0, 0): 2.0, (0, 1): 1.0, (0, 2): 0.5, (1, 3): 1.0}.items():
        for module in (0, 1):
            block = (layer * 4 + expert) * 2 + module
            s = table.sensitivity[block]
            for wide, narrow in ((2, 1), (2, 0), (1, 0)):
                expected = multiplier * eta[layer, expert, module] * max(0, s[narrow] - s[wide])
                found = damage[block, narrow] - damage[block, wide]
                assert found == pytest.approx(expected)


def test_damage_never_falls_as_bits_fall():
    noisy = np.array([[5.0, 2.0, 4.0, 1.0, 3.0]])
    assert transition_costs(noisy).tolist() == [[2.0, 1.0, 1.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("dial", "hot"), [(None, 3), (2, 2), (4, 4), (8, 4)], ids=["auto", "low", "top", "beyond"]
)
def test_hot_experts_keep_more_bits(dial, hot):
    floors = DamageModel(block_table(), PlannerConfig(hot_expert_floor=dial)).floors(MASS)
    assert floors.tolist() == [hot] * 2 + [2] * 14


@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0, -1.0])
def test_an_eta_that_makes_no_sense_counts_as_1(bad):
    model = DamageModel(block_table(), PlannerConfig())
    eta = np.full((2, 4, 2), bad)
    np.testing.assert_array_equal(model.damage(MASS, eta), model.damage(MASS))


def test_state_carries_hot_floors_and_layer_floors():
    model = DamageModel(block_table(), PlannerConfig(layer_floor=2.5))
    top = np.full(16, 4)
    state = model.state(top, top, MASS)
    assert state.layer_of.tolist() == [0] * 8 + [1] * 8
    after = plan(state, 1 << 30).apply(top)
    assert after[:2].min() >= 3
    assert after[:8].mean() == after[8:].mean() == 2.5


def test_table_takes_one_metric_at_the_served_widths():
    found = sensitivity()
    table = block_table(found, "hessian")
    assert table.sensitivity.shape == (16, 3)
    np.testing.assert_array_equal(table.sensitivity[5], found.arrays["hessian"][0, 2, 1, :3])


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (Table({}, {"widths": [2, 3, 4]}), "`output_gradient` of shape None"),
        (sensitivity(widths=(2, 3)), "lacks width 4: it has"),
        (Table({"output_gradient": np.ones((2, 3, 2, 3))}, {"widths": [2, 3, 4]}), "of shape"),
    ],
)
def test_a_table_of_another_model_is_refused(table, message):
    with pytest.raises(StoreError, match=message):
        block_table(table)


def test_unmeasured_blocks_get_the_median_of_their_layer_and_module():
    scores = sensitivity().arrays["output_gradient"]
    scores[0, 1, 0] = 0  # no calibration token
    scores[0, 2, 0, 1] = np.nan
    filled = fill_unmeasured(scores)
    usual = np.median(scores[0, [0, 3], 0], axis=0)
    np.testing.assert_allclose(filled[0, 1, 0], usual)
    np.testing.assert_allclose(filled[0, 2, 0], usual)
    np.testing.assert_array_equal(filled[1], scores[1])
    np.testing.assert_array_equal(filled[0, :, 1], scores[0, :, 1])


def test_a_layer_without_any_measurement_gets_the_median_of_the_others():
    scores = sensitivity().arrays["output_gradient"]
    scores[0, :, 1] = 0
    filled = fill_unmeasured(scores)
    np.testing.assert_allclose(filled[0, 2, 1], np.median(scores[1, :, 1], axis=0))


def test_nothing_measured_still_spreads_bits_evenly():
    filled = fill_unmeasured(np.full((2, 4, 2, 3), np.nan))
    assert (filled == [1.0, 0.25, 0.0625]).all()
