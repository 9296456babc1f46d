"""From logits to tokens. A sequence's result depends on its own logits and generator only."""

from __future__ import annotations

import torch
from torch import Tensor

from pw.engine.request import SamplingParams

_GREEDY_BELOW = 1e-5  # temperatures that leave a float32 softmax nothing but the likeliest token


def make_generator(
    params: SamplingParams, device: torch.device, fallback_seed: int | None = None
) -> torch.Generator | None:
    """Generator of one sequence; None for greedy decoding.

    Args:
        params: Its seed counts first.
        device: Where the logits are.
        fallback_seed: Of a request without a seed; None: fresh entropy.
    """
    if params.temperature < _GREEDY_BELOW:
        return None
    generator = torch.Generator(device)
    seed = fallback_seed if params.seed is None else params.seed
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator


def sample(
    logits: Tensor,  # [S, V]
    params: list[SamplingParams],
    generators: list[torch.Generator | None],
) -> Tensor:  # [S] int64
    """Choose the next token of each sequence; greedily where there is no generator."""
    tokens = logits.argmax(-1)
    for row, generator in enumerate(generators):
        if generator is not None:
            tokens[row] = _sample_row(logits[row].float(), params[row], generator)
    return tokens


def _sample_row(logits: Tensor, params: SamplingParams, generator: torch.Generator) -> Tensor:
    """One draw after temperature, top_k, top_p and min_p, in this order. Ties at the k-th stay."""
    logits = (logits - logits.max()) / params.temperature
    if 0 < params.top_k < logits.numel():
        threshold = logits.topk(params.top_k).values[-1]
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    probabilities = logits.softmax(-1)
    if params.top_p < 1:
        ordered, index = probabilities.sort(descending=True, stable=True)
        outside = ordered.cumsum(-1) - ordered >= params.top_p
        outside[0] = False  # float32 rounds the least values of top_p to 0
        probabilities[index[outside]] = 0
    if params.min_p > 0:
        probabilities[probabilities < params.min_p * probabilities.max()] = 0
    return torch.multinomial(probabilities, 1, generator=generator)[0]
