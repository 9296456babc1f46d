"""Whole experts on ranks: equally many, equally busy, those of the same tokens apart."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pw.config import EngineConfig
from pw.engine.parallel.placing import place_experts
from pw.engine.parallel.seat import Seat
from pw.engine.parallel.source import SharedSource
from pw.engine.start.sources import Loaded, load
from support.engines import make_artifact

CPU = torch.device("cpu")
ATTRIBUTES = (
    *("geometry", "path", "model_name", "artifact_hash", "min_bits", "max_bits"),
    *("lut_dtype", "table_bytes"),
)


def meetings(placed: NDArray[np.int64], pairs: NDArray[np.int64]) -> int:
    """Tokens whose two experts are on one rank; placed [e, R], pairs [E, E]."""
    return sum(
        int(pairs[one, other])
        for held in placed.T
        for one, other in itertools.combinations(held.tolist(), 2)
    )


def routed(experts: int, tokens: int, seed: int) -> NDArray[np.int64]:
    """Pairs [E, E] of tokens with two experts each, that like some pairs better than others."""
    rng = np.random.default_rng(seed)
    likes = np.triu(rng.exponential(size=(experts, experts)) ** 3, 1).ravel()
    drawn = rng.multinomial(tokens, likes / likes.sum()).reshape(experts, experts)
    pairs = drawn + drawn.T
    np.fill_diagonal(pairs, pairs.sum(1))
    return pairs


def test_neighbours_in_weight_share_a_width() -> None:
    placed = place_experts(np.array([[1.0, 9.0, 3.0, 7.0, 5.0, np.nan]]), 2)
    assert placed.tolist() == [[[1, 3], [2, 4], [0, 5]]]


def test_two_experts_of_the_same_tokens_are_kept_apart() -> None:
    """0 and 3 come together, so do 1 and 2: by weight alone each rank has both of two."""
    mass = np.array([[4.0, 3.0, 2.0, 1.0]])
    pairs = np.array([[[9, 0, 0, 9], [0, 5, 5, 0], [0, 5, 5, 0], [9, 0, 0, 9]]])
    assert place_experts(mass, 2).tolist() == [[[0, 1], [3, 2]]]
    assert place_experts(mass, 2, pairs).tolist() in ([[[1, 0], [3, 2]]], [[[0, 1], [2, 3]]])


@pytest.mark.parametrize("size", [2, 4])
def test_fewer_experts_of_a_token_meet_and_rows_stay_as_they_were(size: int) -> None:
    layers, experts = 3, 16
    pairs = np.stack([routed(experts, 4000, seed) for seed in range(layers)])
    kept = pairs.copy()
    mass = np.stack([np.diagonal(each) for each in pairs]).astype(np.float64)
    plain, apart = place_experts(mass, size), place_experts(mass, size, pairs)
    np.testing.assert_array_equal(pairs, kept)
    np.testing.assert_array_equal(np.sort(plain, axis=2), np.sort(apart, axis=2))
    for slot in range(layers):
        assert meetings(apart[slot], pairs[slot]) < 0.9 * meetings(plain[slot], pairs[slot])
        for row in range(experts // size):  # no exchange of two is better
            for one, other in itertools.combinations(range(size), 2):
                changed = apart[slot].copy()
                changed[row, [one, other]] = changed[row, [other, one]]
                assert meetings(changed, pairs[slot]) >= meetings(apart[slot], pairs[slot])


def test_as_good_as_the_best_of_all_ways() -> None:
    pairs = routed(8, 1000, 7)
    mass = np.diagonal(pairs).astype(np.float64)
    rows = place_experts(mass[None], 2)[0]
    ways = [
        np.array([row[::-1] if turned else row for row, turned in zip(rows, turns, strict=True)])
        for turns in itertools.product([False, True], repeat=len(rows))
    ]
    best = min(meetings(way, pairs) for way in ways)
    assert meetings(place_experts(mass[None], 2, pairs[None])[0], pairs) <= 1.1 * best


def test_ranks_place_by_what_the_artifact_knows(tmp_path: Path) -> None:
    """Weights and pairs of `pw trace`; an artifact of before has weights alone, or neither."""
    path = make_artifact("qwen2_moe", tmp_path)[1]
    loaded = load(path, EngineConfig(), CPU)
    layers, experts = len(loaded.source.geometry.layers), loaded.source.geometry.experts
    pairs = np.stack([routed(experts, 1000, seed) for seed in range(layers)])
    mass = np.stack([np.diagonal(each) for each in pairs]).astype(np.float32)

    def placed(arrays: dict[str, Any] | None) -> NDArray[np.int64]:
        source: Any = SimpleNamespace(
            **{name: getattr(loaded.source, name) for name in ATTRIBUTES},
            has_table=lambda stage: stage == "routing" and arrays is not None,
            table=lambda stage: SimpleNamespace(arrays=arrays),
        )
        shared = Seat(0, 2, by_expert=True).shared(Loaded(source, loaded.skeleton, None)).source
        found = cast(SharedSource, shared).share.placed
        assert found is not None
        return found

    three = np.stack([mass, mass, mass])  # prompts
    np.testing.assert_array_equal(
        placed({"mass": three, "pairs": pairs}), place_experts(mass, 2, pairs)
    )
    np.testing.assert_array_equal(placed({"mass": three}), place_experts(mass, 2))
    np.testing.assert_array_equal(placed(None), place_experts(np.zeros_like(mass), 2))
