import math

import numpy as np
import pytest

from pw.errors import StoreError
from pw.planning.residual import ExactResidual, ResidualHeads, bounded_exp, merge
from pw.store.tables import Table

L, E, F = 2, 3, 5


def table(seed=0, **change):
    random = np.random.default_rng(seed)
    arrays = {
        "coef": random.normal(0, 0.1, (L, 2 * E, F)),
        "intercept": random.normal(0, 0.1, (L, 2 * E)),
        "kept": np.ones((L, 2 * E), dtype=bool),
    }
    return Table({**arrays, **change})


def test_heads_predict_eta_in_expert_module_order():
    found = table()
    features = np.random.default_rng(1).normal(size=(L, F))
    eta = ResidualHeads.from_table(found, clamp=9.0).predict(features)
    assert eta.shape == (L, E, 2)
    layer, expert, module = 1, 2, 1
    head = expert * 2 + module
    y = found.arrays["coef"][layer, head] @ features[layer] + found.arrays["intercept"][layer, head]
    assert eta[layer, expert, module] == pytest.approx(math.exp(y), rel=1e-5)


def test_a_dropped_head_says_1_even_if_it_holds_nonsense():
    kept = np.ones((L, 2 * E), dtype=bool)
    kept[0, 3] = False
    coef = table().arrays["coef"].copy()
    coef[0, 3] = np.nan
    eta = ResidualHeads.from_table(table(kept=kept, coef=coef), 1.0).predict(np.ones((L, F)))
    assert eta[0, 1, 1] == 1.0
    assert np.isfinite(eta).all()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e38])
def test_eta_is_bounded_whatever_the_features(poison):
    features = np.zeros((L, F))
    features[0] = poison
    eta = ResidualHeads.from_table(table(), clamp=0.7).predict(features)
    assert (eta >= math.exp(-0.7) - 1e-12).all()
    assert (eta <= math.exp(0.7) + 1e-12).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"coef": np.ones((L, 4, F))}, "disagree"),
        ({"kept": np.ones((L, 5))}, "disagree"),
        ({"intercept": np.full((L, 2 * E), np.nan)}, "not finite"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused(change, message):
    with pytest.raises(StoreError, match=message):
        ResidualHeads.from_table(table(**change), 1.0)


def test_a_table_without_an_array_names_it():
    arrays = dict(table().arrays)
    del arrays["kept"]
    with pytest.raises(StoreError, match="no array `kept`"):
        ResidualHeads.from_table(Table(arrays), 1.0)


def exact(prior=0.0, seed=0, W=3, columns=(7, 4)):
    random = np.random.default_rng(seed)
    energies = tuple(random.exponential(1, (L, E, W, K)).astype(np.float32) for K in columns)
    moments = tuple(random.exponential(1, (L, E, K)).astype(np.float32) for K in columns)
    return ExactResidual(energies, moments, clamp=9.0, prior=prior), energies, moments


def test_exact_residual_of_the_calibration_text_is_1():
    residual, _, moments = exact(prior=4.0)
    np.testing.assert_allclose(residual.eta(moments, np.full((L, E), 9.0)), 1.0, rtol=1e-5)


def test_exact_residual_is_the_ratio_of_scores():
    residual, energies, moments = exact(seed=2)
    prompt = tuple(m[::-1] * 1.5 for m in moments)
    eta = residual.eta(prompt, np.ones((L, E)))
    for module in (0, 1):
        ratios = [
            energies[module][1, 2, w]
            @ prompt[module][1, 2]
            / (energies[module][1, 2, w] @ moments[module][1, 2])
            for w in range(3)
        ]
        assert eta[1, 2, module] == pytest.approx(np.mean(ratios), rel=1e-5)


def test_few_tokens_count_less_and_none_not_at_all():
    residual, _, moments = exact(prior=4.0)
    tokens = np.zeros((L, E))
    tokens[0, 1] = 4
    prompt = tuple(m * math.e for m in moments)
    prompt[0][1, 1] = np.nan  # a row without tokens is not read
    eta = residual.eta(prompt, tokens)
    assert eta[0, 1, 0] == pytest.approx(math.exp(0.5), rel=1e-5)
    assert (np.delete(eta.ravel(), [2, 3]) == 1.0).all()


def test_a_block_without_error_or_moments_offline_says_1():
    _, energies, moments = exact()
    energies[0][0, 0] = 0
    moments[1][1, 1] = 0
    eta = ExactResidual(energies, moments, clamp=1.0).eta(moments, np.ones((L, E)))
    assert eta[0, 0, 0] == 1.0
    assert eta[1, 1, 1] == 1.0
    assert np.isfinite(eta).all()


def test_requests_are_merged_by_remaining_tokens():
    low, high = np.full((1, 2, 2), 0.5), np.full((1, 2, 2), 2.0)
    np.testing.assert_allclose(merge([low, high], [30, 10]), 0.875)
    np.testing.assert_allclose(merge([low, high], [0, -3]), 1.25)
    np.testing.assert_allclose(merge([low, high], [5, -3]), 0.5)
    assert merge([], []) is None


def test_bounded_exp_reads_nan_as_no_evidence():
    found = bounded_exp(np.array([np.nan, np.inf, -np.inf, 0.5]), 1.0)
    np.testing.assert_allclose(found, [1.0, math.e, 1 / math.e, math.exp(0.5)])
