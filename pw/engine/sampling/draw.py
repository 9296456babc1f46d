"""From logits to tokens. A sequence's result depends on its own logits, seed and place only.

The chance comes from the host: one number for each token of a sequence, a function of its seed and
of how many tokens it has, so that it is the same in any batch, on any device, and when a step is
computed again. On the device nothing waits: the token is where that number falls in the cumulative
probabilities.

Axes: S sequences, R rows drawn at a time, V tokens of the vocabulary.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pw.engine.request import SamplingParams
from pw.memory.budget import sampled_rows
from pw.memory.small_copies import to_device

_GREEDY_BELOW = 1e-5  # temperatures that leave a float32 softmax nothing but the likeliest token
_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15  # of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)


@dataclass(frozen=True)
class Chance:
    """The random numbers of one sequence: SplitMix64, read at any place."""

    seed: int  # 64 bits

    def at(self, place: int) -> float:
        """Uniform in [0, 1), a multiple of 2^-53."""
        start = _mix(self.seed & _MASK)  # neighbouring seeds begin far apart
        return (_mix((start + (place + 1) * _STEP) & _MASK) >> 11) * 2.0**-53


def _mix(z: int) -> int:
    """The finalizer of SplitMix64."""
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & _MASK
    return z ^ z >> 31


def make_chance(params: SamplingParams, fallback_seed: int | None = None) -> Chance | None:
    """The random numbers of one sequence; None for greedy decoding.

    Args:
        params: Its seed counts first.
        fallback_seed: Of a request without a seed; None: fresh entropy.
    """
    if params.temperature < _GREEDY_BELOW:
        return None
    seed = fallback_seed if params.seed is None else params.seed
    return Chance(secrets.randbits(64) if seed is None else seed)


def sample(
    logits: Tensor,  # [S, V]
    params: Seq[SamplingParams],
    uniforms: Seq[float | None],
    tokens: Tensor | None = None,
) -> Tensor:  # [S] int64
    """Choose the next token of each sequence, without a wait.

    Args:
        logits: Any float dtype; rows with NaN give any token.
        params: Of each sequence.
        uniforms: A number in [0, 1) for each; None takes the likeliest token.
        tokens: [S] the likeliest ones, if they are known; drawn ones take their places.
    """
    if tokens is None:
        tokens = logits.argmax(-1)
    for rows, filters in _parts(params, uniforms, logits.shape[1], sampled_rows(logits.device)):
        settings = np.array([(*_dials(params[row]), uniforms[row]) for row in rows], np.float64)
        if len(rows) == len(logits):
            tokens = _draw(logits, settings, filters)
        elif len(rows) == 1:
            row = rows[0]
            tokens[row : row + 1] = _draw(logits[row : row + 1], settings, filters)
        else:
            index = to_device(np.array(rows), logits.device)
            tokens.index_copy_(0, index, _draw(logits[index], settings, filters))
    return tokens


def _dials(its: SamplingParams) -> tuple[float, ...]:
    return its.temperature, its.top_k, its.top_p, its.min_p


def _parts(
    params: Seq[SamplingParams], uniforms: Seq[float | None], vocabulary: int, most: int
) -> Iterator[tuple[list[int], bool]]:
    """Rows that are drawn together, `most` at a time, and whether likely tokens are sorted out.

    Which way a row goes depends on its own parameters alone.
    """
    ways: tuple[list[int], list[int]] = ([], [])
    for row, (its, uniform) in enumerate(zip(params, uniforms, strict=True)):
        if uniform is not None:
            ways[0 < its.top_k < vocabulary or its.top_p < 1].append(row)
    for filters, rows in enumerate(ways):
        for start in range(0, len(rows), most):
            yield rows[start : start + most], bool(filters)


def _draw(logits: Tensor, settings: NDArray[np.float64], filters: bool) -> Tensor:
    """A token of each row [R] after temperature, top_k, top_p and min_p, in this order.

    Ties at the k-th stay.

    Args:
        logits: [R, V].
        settings: [R, 5] temperature, top_k, top_p, min_p and a number in [0, 1).
        filters: Whether any row has top_k or top_p.
    """
    count, vocabulary = logits.shape
    on_device = to_device(np.ascontiguousarray(settings.T), logits.device)[..., None]
    temperature, top_k, top_p, min_p = on_device[:4].float()
    logits = logits.float()
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature
    order = None
    if filters:
        logits, order = logits.sort(descending=True, stable=True)
        place = torch.where((top_k > 0) & (top_k < vocabulary), top_k, vocabulary).long() - 1
        logits = logits.masked_fill(logits < logits.gather(1, place), -torch.inf)
    probabilities = logits.softmax(-1)
    if filters:
        outside = probabilities.cumsum(-1) - probabilities >= top_p
        outside[:, 0] = False  # float32 rounds the least values of top_p to 0
        outside &= top_p < 1
        probabilities.masked_fill_(outside, 0)
    if bool((settings[:, 3] > 0).any()):
        least = min_p * probabilities.amax(-1, keepdim=True)
        probabilities.masked_fill_(probabilities < least, 0)
    reached = probabilities.cumsum(-1, dtype=torch.float64)
    chosen = torch.searchsorted(reached, on_device[4] * reached[:, -1:], right=True)
    chosen = chosen.clamp_(max=vocabulary - 1)  # NaN falls nowhere
    if order is not None:
        chosen = order.gather(1, chosen)
    return chosen.view(count)
