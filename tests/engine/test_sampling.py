"""Sampling against a numpy reference; nothing depends on who else is in the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pw.engine.request import SamplingParams
from pw.engine.sampling.draw import make_generator, sample

V = 24
CPU = torch.device("cpu")


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
    generator = make_generator(params, CPU)
    tokens = [int(sample(logits, [params], [generator])) for _ in range(count)]
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
    assert make_generator(params, CPU) is None
    assert sample(logits, [params] * 2, [None] * 2).tolist() == [0, 7]


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-6, 1e-4])
def test_tiny_temperatures_are_greedy_not_nan(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=1)
    logits = torch.randn(1, V) * 30
    assert draw(logits, params, 20)[int(logits.argmax())] == 1


def test_same_seed_same_tokens_whatever_the_neighbours() -> None:
    params = SamplingParams(seed=5, top_p=0.9)
    logits = torch.randn(40, V)
    alone = make_generator(params, CPU)
    expected = [int(sample(row[None], [params], [alone])) for row in logits]
    mine = make_generator(params, CPU)
    others = [SamplingParams(seed=s, temperature=0 if s % 3 == 0 else 1.3) for s in range(6)]
    generators = [make_generator(other, CPU) for other in others]
    for step, row in enumerate(logits):
        size, place = step % 7, step % (step % 7 + 1)
        batch = torch.randn(size + 1, V)
        batch[place] = row
        who = [*others[:place], params, *others[place:size]]
        by = [*generators[:place], mine, *generators[place:size]]
        assert int(sample(batch, who, by)[place]) == expected[step]


def test_without_a_seed_runs_differ() -> None:
    params = SamplingParams()
    logits = torch.zeros(1, 1000)
    runs = {
        tuple(int(sample(logits, [params], [generator])) for _ in range(4))
        for generator in (make_generator(params, CPU) for _ in range(20))
    }
    assert len(runs) >= 19


@pytest.mark.parametrize("top_p", [5e-324, 1e-320, 1e-46, 1e-30])
def test_a_top_p_that_rounds_to_nothing_leaves_the_likeliest_token(top_p: float) -> None:
    params = SamplingParams(temperature=1.0, top_p=top_p, seed=0)
    logits = torch.randn(1, 50)
    chosen = sample(logits, [params], [make_generator(params, CPU)])
    assert chosen.tolist() == logits.argmax(-1).tolist()
