"""Sampling against a numpy reference; nothing depends on who else is in the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pw.engine.request import SamplingParams
from pw.engine.sampling import draw as draw_module
from pw.engine.sampling.draw import Chance, make_chance, sample

V = 24


def reference(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Probabilities after temperature, top_k, top_p, min_p: [V] float64."""
    scaled = logits.astype(np.float64) / params.temperature
    if 0 < params.top_k < len(scaled):
        scaled[scaled < np.sort(scaled)[-params.top_k]] = -np.inf
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    order = np.argsort(-probabilities, kind="stable")
    before = np.cumsum(probabilities[order]) - probabilities[order]
    if params.top_p < 1:
        probabilities[order[before >= params.top_p]] = 0
    probabilities[probabilities < params.min_p * probabilities.max()] = 0
    return probabilities / probabilities.sum()


def draw(logits: torch.Tensor, params: SamplingParams, count: int) -> np.ndarray:
    """Frequencies [V] of `count` draws of one sequence."""
    chance = make_chance(params)
    numbers = [None if chance is None else chance.at(place) for place in range(count)]
    tokens = [int(sample(logits, [params], [number])) for number in numbers]
    return np.bincount(tokens, minlength=logits.shape[1]) / count


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.4},
        {"temperature": 2.0},
        {"top_k": 3},
        {"top_k": V + 5},
        {"top_p": 0.6},
        {"top_p": 1e-9},
        {"min_p": 0.3},
        {"min_p": 1.0},
        {"temperature": 1.5, "top_k": 6, "top_p": 0.8, "min_p": 0.1},
    ],
    ids=str,
)
def test_frequencies_follow_the_reference(settings: dict[str, float]) -> None:
    params = SamplingParams(seed=11, **settings)  # type: ignore[arg-type]
    logits = torch.randn(1, V) * 2
    expected = reference(logits[0].numpy(), params)
    found = draw(logits, params, 2000)
    assert (found[expected == 0] == 0).all()
    # Four standard deviations of a frequency.
    assert (np.abs(found - expected) <= 4 * np.sqrt(expected * (1 - expected) / 2000) + 1e-9).all()


def test_greedy_takes_the_first_of_the_likeliest() -> None:
    logits = torch.zeros(2, V)
    logits[1, 7] = logits[1, 9] = 3
    params = SamplingParams(temperature=0)
    assert make_chance(params) is None
    assert sample(logits, [params] * 2, [None] * 2).tolist() == [0, 7]


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-6, 1e-4])
def test_tiny_temperatures_are_greedy_not_nan(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=1)
    logits = torch.randn(1, V) * 30
    assert draw(logits, params, 20)[int(logits.argmax())] == 1


def test_same_seed_same_tokens_whatever_the_neighbours() -> None:
    params = SamplingParams(seed=5, top_p=0.9)
    logits = torch.randn(40, V)
    chance = Chance(5)
    expected = [
        int(sample(row[None], [params], [chance.at(step)])) for step, row in enumerate(logits)
    ]
    others = [SamplingParams(seed=s, temperature=0 if s % 3 == 0 else 1.3) for s in range(6)]
    chances = [make_chance(other) for other in others]
    for step, row in enumerate(logits):
        size, place = step % 7, step % (step % 7 + 1)
        batch = torch.randn(size + 1, V)
        batch[place] = row
        who = [*others[:place], params, *others[place:size]]
        whose = [*chances[:place], chance, *chances[place:size]]
        by = [None if its is None else its.at(step) for its in whose]
        assert int(sample(batch, who, by)[place]) == expected[step]


def test_without_a_seed_runs_differ() -> None:
    params = SamplingParams()
    logits = torch.zeros(1, 1000)
    runs = {
        tuple(int(sample(logits, [params], [chance.at(place)])) for place in range(4))
        for chance in (make_chance(params) for _ in range(20))
        if chance is not None
    }
    assert len(runs) >= 19


@pytest.mark.parametrize("top_p", [5e-324, 1e-320, 1e-46, 1e-30])
def test_a_top_p_that_rounds_to_nothing_leaves_the_likeliest_token(top_p: float) -> None:
    params = SamplingParams(temperature=1.0, top_p=top_p, seed=0)
    logits = torch.randn(1, 50)
    chosen = sample(logits, [params], [0.99])
    assert chosen.tolist() == logits.argmax(-1).tolist()


def test_chance_is_splitmix64() -> None:
    """The first numbers of SplitMix64 from its reference program, for the start that 0 leads to."""
    assert Chance(0).at(0) == (0xE220A8397B1DCDAF >> 11) * 2.0**-53
    assert Chance(0).at(1) == (0x6E789E6AA1B965F4 >> 11) * 2.0**-53


def test_chance_is_even_over_seeds_and_places() -> None:
    drawn = np.array([[Chance(seed).at(place) for place in range(64)] for seed in range(-32, 32)])
    assert drawn.min() >= 0
    assert drawn.max() < 1
    count = drawn.size
    assert len(np.unique(drawn)) == count
    for bins in (drawn, drawn.T):  # a row or a column says nothing of the next
        left, right = bins[:-1].ravel() - 0.5, bins[1:].ravel() - 0.5
        assert abs((left * right).mean()) < 4 / 12 / np.sqrt(count)
    expected = count / 16
    assert np.abs(np.histogram(drawn, 16, (0, 1))[0] - expected).max() < 5 * np.sqrt(expected)


def test_rows_drawn_together_are_those_drawn_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: list[dict[str, float]] = [
        {}, {"top_k": 4}, {"temperature": 0}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": V + 9},
        {"top_k": 6, "top_p": 0.8, "min_p": 0.1, "temperature": 1.7}, {"top_p": 1e-9},
    ]  # fmt: skip
    params = [SamplingParams(**its) for its in settings] * 5  # type: ignore[arg-type]
    logits, uniforms = torch.randn(40, V) * 2, torch.rand(40, dtype=torch.float64).tolist()
    numbers = [None if its.temperature == 0 else u for its, u in zip(params, uniforms, strict=True)]
    alone = sample(logits, params, numbers)
    for most in (3, 16, 99):
        monkeypatch.setattr(draw_module, "sampled_rows", lambda _, most=most: most)
        assert torch.equal(sample(logits, params, numbers), alone)


def test_a_row_that_is_not_finite_disturbs_nobody() -> None:
    logits = torch.randn(3, V)
    params = [SamplingParams(top_p=0.9)] * 3
    expected = sample(logits, params, [0.3, 0.5, 0.7])
    logits[1, 4] = torch.nan
    found = sample(logits, params, [0.3, 0.5, 0.7])
    assert (found[0], found[2]) == (expected[0], expected[2])
    assert 0 <= int(found[1]) < V
