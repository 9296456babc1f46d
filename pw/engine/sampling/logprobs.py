"""Log-probabilities of tokens and of the likeliest ones at their places, from logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pw.engine.request import TokenLogprob
from pw.memory.budget import SCORED_ROWS
from pw.memory.small_copies import to_device, to_host

Scored = Callable[[], list[TokenLogprob]]
"""Log-probabilities, to be asked for once a `small_copies.mark` is reached."""


def score(
    logits: Tensor, tokens: Sequence[int] | Tensor, counts: Sequence[int], vocabulary: int
) -> Scored:
    """Score one token per row, without a wait; `SCORED_ROWS` rows are normalised at a time.

    Both numbers of a row are read from the same float32 log-softmax, so that a client may find out
    by equality whether a token is the likeliest.

    Args:
        logits: [n, V], as the model gave them, before temperature, penalties and masks.
        tokens: [n] ids; below 0: none, and the row's entry means nothing.
        counts: [n] how many alternatives to list; 0 = none.
        vocabulary: Tokens that have a text; V may be padded beyond them.
    """
    if not isinstance(tokens, Tensor):
        tokens = to_device(np.array(tokens, dtype=np.int64), logits.device)
    parts = []
    for first in range(0, len(logits), SCORED_ROWS):
        rows = slice(first, first + SCORED_ROWS)
        parts.append(_score(logits[rows], tokens[rows], counts[rows], vocabulary))
    return lambda: [entry for part in parts for entry in part()]


def _score(logits: Tensor, tokens: Tensor, counts: Sequence[int], vocabulary: int) -> Scored:
    logprobs = logits.float().log_softmax(-1)
    chosen = to_host(logprobs.gather(1, tokens.clamp(min=0)[:, None])[:, 0])
    ids, most = to_host(tokens), min(max(counts), vocabulary)
    if most == 0:
        return lambda: list(map(TokenLogprob, ids.tolist(), chosen.tolist()))
    top = logprobs[:, :vocabulary].topk(most)
    best = (to_host(top.indices), to_host(top.values))
    return lambda: _entries(ids, chosen, best, counts)


def _entries(
    ids: NDArray[Any], chosen: NDArray[Any], best: tuple[NDArray[Any], ...], counts: Sequence[int]
) -> list[TokenLogprob]:
    tops = zip(*(part.tolist() for part in best), counts, strict=True)
    return [
        TokenLogprob(token, logprob, tuple(zip(top[:k], values[:k], strict=True)))
        for token, logprob, (top, values, k) in zip(
            ids.tolist(), chosen.tolist(), tops, strict=True
        )
    ]
