import numpy as np
import pytest

from pw.errors import ConfigError
from pw.evaluation.bootstrap import mean_interval, paired_interval


def test_interval_agrees_with_the_normal_approximation() -> None:
    values = np.random.default_rng(1).normal(3.0, 2.0, size=400)
    interval = mean_interval(values.tolist())
    half = 1.96 * values.std() / np.sqrt(len(values))
    assert interval.mean == pytest.approx(values.mean())
    assert interval.low == pytest.approx(values.mean() - half, abs=0.05 * half)
    assert interval.high == pytest.approx(values.mean() + half, abs=0.05 * half)


def test_coverage_is_what_it_says() -> None:
    rng = np.random.default_rng(2)
    hits = 0
    for seed in range(200):
        interval = mean_interval(rng.exponential(size=60).tolist(), draws=500, seed=seed, level=0.9)
        hits += interval.low <= 1.0 <= interval.high
    assert 0.82 <= hits / 200 <= 0.95


def test_same_seed_same_interval_and_more_draws_than_one_batch() -> None:
    values = list(np.random.default_rng(3).normal(size=3000))
    assert mean_interval(values, draws=3000) == mean_interval(values, draws=3000)
    assert mean_interval(values, draws=3000) != mean_interval(values, draws=3000, seed=1)


def test_pairing_removes_what_both_share() -> None:
    rng = np.random.default_rng(4)
    difficulty = rng.normal(3.0, 1.0, size=100)
    better = (difficulty - 0.01 + rng.normal(0, 0.005, size=100)).tolist()
    interval = paired_interval(better, difficulty.tolist())
    assert interval.low < -0.01 < interval.high < 0
    assert mean_interval(better).high - mean_interval(better).low > 50 * (
        interval.high - interval.low
    )


def test_a_constant_has_no_width() -> None:
    interval = mean_interval([2.0] * 5)
    assert (interval.low, interval.mean, interval.high) == (2.0, 2.0, 2.0)
    assert str(mean_interval([0.5])) == "+0.5000 [+0.5000, +0.5000]"


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="no values"):
        mean_interval([])
    with pytest.raises(ConfigError, match="3 against 2") as refusal:
        paired_interval([1.0, 2.0, 3.0], [1.0, 2.0])
    assert "--max-chunks" in refusal.value.hint
