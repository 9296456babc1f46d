import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pw.planning.routing import Bucket, RoutingStats, buckets


def test_mass_is_the_share_of_router_weight():
    stats = RoutingStats(2, 4, window=1e9, prior=0)
    stats.update(np.array([[3.0, 1, 0, 0], [0, 0, 5, 5]]), tokens=4)
    np.testing.assert_allclose(stats.mass(), [[0.75, 0.25, 0, 0], [0, 0, 0.5, 0.5]])


def test_old_tokens_decay_to_1_over_e_in_a_window():
    stats = RoutingStats(1, 2, window=100, prior=0)
    stats.update(np.array([[10.0, 0]]), tokens=10)
    stats.update(np.array([[0, 100.0]]), tokens=100)
    np.testing.assert_allclose(stats.mass()[0, 0], (10 / math.e) / (10 / math.e + 100))
    assert stats.tokens == pytest.approx(10 / math.e + 100)


def test_chunks_of_a_stream_decay_like_one_update_each():
    one, many = (RoutingStats(1, 2, window=50, prior=7) for _ in range(2))
    one.update(np.array([[6.0, 2]]), tokens=0)  # no tokens: nothing happened
    one.update(np.array([[6.0, 2]]), tokens=8)
    one.update(np.zeros((1, 2)), tokens=8)
    many.update(np.array([[6.0, 2]]), tokens=8)
    for _ in range(8):
        many.update(np.zeros((1, 2)), tokens=1)
    np.testing.assert_allclose(one._sums, many._sums)


def test_few_tokens_are_shrunk_toward_the_offline_trace():
    offline = np.array([[8.0, 2]])
    stats = RoutingStats(1, 2, window=1e9, prior=30, offline=offline)
    np.testing.assert_allclose(stats.mass(), [[0.8, 0.2]])
    stats.update(np.array([[0, 10.0]]), tokens=10)
    np.testing.assert_allclose(stats.mass(), [[0.75 * 0.8, 0.25 + 0.75 * 0.2]])


def test_a_layer_without_trace_is_uniform_and_without_tokens_keeps_its_trace():
    stats = RoutingStats(2, 2, window=10, prior=5, offline=np.array([[0.0, 0], [3, 1]]))
    stats.update(np.array([[1.0, 0], [0, 0]]), tokens=5)
    np.testing.assert_allclose(stats.mass(), [[0.75, 0.25], [0.75, 0.25]])


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.floats(width=32), min_size=6, max_size=6), st.integers(-1, 10_000)),
        max_size=6,
    ),
    st.sampled_from([0.0, 16.0]),
)
def test_rows_sum_to_1_whatever_comes_in(updates, prior):
    stats = RoutingStats(2, 3, window=64, prior=prior)
    for sums, tokens in updates:
        stats.update(np.array(sums, dtype=np.float32).reshape(2, 3), tokens)
        mass = stats.mass()
        assert (mass >= 0).all()
        np.testing.assert_allclose(mass.sum(axis=1), 1.0)


def test_buckets_are_relative_to_uniform():
    mass = np.array([[0.5, 0.25, 0.125, 0.124, 0.001]])
    found = buckets(mass * 1.0, hot_mass=2.0, cold_mass=0.5)
    assert found.tolist() == [[Bucket.HOT, Bucket.WARM, Bucket.WARM, Bucket.WARM, Bucket.COLD]]


@pytest.mark.parametrize("shape", [(1, 3), (2, 2)])
def test_other_shapes_are_refused(shape):
    with pytest.raises(ValueError, match="expected"):
        RoutingStats(2, 3, 10, 1, np.ones(shape))
    with pytest.raises(ValueError, match="expected"):
        RoutingStats(2, 3, 10, 1).update(np.ones(shape), 1)


def test_buckets_relative_to_an_expected_mass():
    mass = np.array([[0.5, 0.25, 0.24, 0.01]])
    expected = np.array([[0.5, 0.1, 0.4, 0.0]])
    found = buckets(mass, hot_mass=2.0, cold_mass=0.7, expected=expected)
    # The last had no offline share: it is compared with a tenth of the uniform one, 0.025.
    assert found.tolist() == [[Bucket.WARM, Bucket.HOT, Bucket.COLD, Bucket.COLD]]
