"""Prompt features: exact values by hand, the same in chunks and in any dtype."""

from __future__ import annotations

import math

import pytest
import torch

from pw.models.features import FeatureSums, feature_count, prompt_features


def test_features_of_two_tokens_by_hand() -> None:
    hidden = torch.tensor([[3.0, 4.0], [0.0, 10.0]])
    expected = torch.tensor(
        [math.log(7.5), math.log(math.sqrt((25 + 100) / 2)), math.log(10.0), 1.5, 7.0]
    )
    torch.testing.assert_close(prompt_features(hidden), expected)
    assert feature_count(2) == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_add_up_to_the_whole_at_each_layer(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = (torch.randn(3, 700, 48, generator=generator) * 30).to(dtype)
    sums = FeatureSums(3, 48)
    for chunk in torch.split(hidden, [1, 0, 499, 200], dim=1):
        for layer, its in enumerate(chunk):
            sums.add(layer, its)
    expected = torch.stack([prompt_features(its) for its in hidden])
    torch.testing.assert_close(sums.features(), expected, rtol=1e-6, atol=1e-6)
    assert sums.features().dtype == torch.float32
    assert sums.features().shape == (3, feature_count(48))


def test_zero_hidden_states_stay_finite_and_no_tokens_are_an_error() -> None:
    assert prompt_features(torch.zeros(2, 3)).isfinite().all()
    sums = FeatureSums(2, 3)
    with pytest.raises(ValueError, match="0 tokens and 0 of 2 layers"):
        sums.features()
    sums.add(0, torch.ones(4, 3))
    with pytest.raises(ValueError, match="0 tokens and 1 of 2 layers"):
        sums.features()


def test_a_pass_that_broke_between_layers_leaves_nothing() -> None:
    hidden = torch.randn(3, 9, 5, generator=torch.Generator().manual_seed(1))
    sums = FeatureSums(3, 5)
    for start, end, layers in ((0, 4, 3), (4, 9, 2), (4, 9, 1), (4, 9, 3)):
        for layer in range(layers):
            sums.add(layer, hidden[layer, start:end])
    expected = torch.stack([prompt_features(its) for its in hidden])
    torch.testing.assert_close(sums.features(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("layer", "tokens"), [(1, 4), (3, 4), (2, 5)])
def test_layers_come_once_in_order_with_the_same_tokens(layer: int, tokens: int) -> None:
    sums = FeatureSums(4, 3)
    for first in (0, 1):
        sums.add(first, torch.ones(4, 3))
    with pytest.raises(ValueError, match=f"layer {layer} of {tokens} tokens after 2 layers of 4"):
        sums.add(layer, torch.ones(tokens, 3))
