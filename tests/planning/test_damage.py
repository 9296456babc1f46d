import numpy as np
import pytest

from pw.blocks import BlockShape, ExpertGeometry
from pw.config import PlannerConfig
from pw.errors import ConfigError, StoreError
from pw.planning.damage import DamageModel, damage_rates, transition_costs
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


TRACE = np.array([[6e3, 3e3, 900.0, 100.0], [2.5e3] * 4])  # router weight of the calibration text


def test_damage_is_in_proportion_to_mass():
    table = block_table()
    eta = np.random.default_rng(1).uniform(0.5, 2, (2, 4, 2))
    model = DamageModel(table, PlannerConfig(evidence_prior=0), TRACE)
    offline = TRACE / TRACE.sum(1, keepdims=True)
    np.testing.assert_allclose(model.damage(offline), transition_costs(table.sensitivity))
    scale = np.repeat((MASS / offline).ravel(), 2)[:, None] * eta.reshape(-1, 1)
    np.testing.assert_allclose(
        model.damage(MASS, eta), scale * transition_costs(table.sensitivity), rtol=1e-12
    )
    assert (model.floors(MASS) == 2).all()


def test_hessian_means_are_multiplied_by_mass_as_they_are():
    table = block_table(metric="hessian")
    config = PlannerConfig(metric="hessian", evidence_prior=0)
    found = DamageModel(table, config, TRACE).damage(MASS)
    expected = np.repeat(MASS.ravel(), 2)[:, None] * transition_costs(table.sensitivity)
    np.testing.assert_allclose(found, expected)


@pytest.mark.parametrize("metric", ["output_gradient", "hessian"])
def test_a_rate_seen_on_little_text_is_shrunk_to_that_of_its_layer_and_module(metric):
    table = block_table(metric=metric)
    own, usual, between = (
        damage_rates(table, TRACE, prior, contains_routing=metric == "output_gradient")
        for prior in (0.0, 1e12, 100.0)
    )
    by_expert = usual.reshape(2, 4, 2, 3)
    np.testing.assert_allclose(by_expert, np.broadcast_to(by_expert[:, :1], by_expert.shape))
    share = (TRACE / TRACE.sum(1, keepdims=True))[:, :, None, None]
    mean = (share * own.reshape(by_expert.shape)).sum(1)
    np.testing.assert_allclose(by_expert[:, 0], mean)
    np.testing.assert_allclose(between[6:8], (own[6:8] + usual[6:8]) / 2)  # 100 seen, prior 100
    np.testing.assert_allclose(between[:2], (60 * own[:2] + usual[:2]) / 61)


def test_a_block_that_was_not_measured_has_the_usual_rate_whatever_the_trace_says():
    scores = sensitivity().arrays["output_gradient"]
    scores[0, 1, 0] = 0
    table = block_table(Table({"output_gradient": scores}, {"widths": [2, 3, 4, 5]}))
    rates = damage_rates(table, TRACE, 16, contains_routing=True)
    usual = damage_rates(table, TRACE, 1e12, contains_routing=True)
    np.testing.assert_allclose(rates[2], usual[2])
    assert not np.allclose(rates[3], usual[3])


def test_an_expert_that_nobody_visits_keeps_an_order_of_its_widths():
    damage = DamageModel(block_table(), PlannerConfig(), TRACE).damage(
        np.array([[1.0, 0, 0, 0]] * 2)
    )
    assert (np.diff(damage, axis=1) < 0).all()
    nowhere = DamageModel(block_table(), PlannerConfig(), np.zeros((2, 4))).damage(MASS)
    assert np.isfinite(nowhere).all()
    assert (nowhere[:, 0] > 0).all()


def test_without_a_trace_the_rule_is_that_of_buckets():
    table, buckets = block_table(), PlannerConfig(routing_rule="buckets")
    np.testing.assert_array_equal(
        DamageModel(table, PlannerConfig()).damage(MASS), DamageModel(table, buckets).damage(MASS)
    )
    with pytest.raises(ConfigError, match="must be proportional or buckets: `ratio`"):
        PlannerConfig(routing_rule="ratio")


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
