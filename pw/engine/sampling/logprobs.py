"""Log-probabilities of tokens and of the likeliest ones at their places, from logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pw.engine.request import TokenLogprob
from pw.memory.budget import SCORED_ROWS


def score(
    logits: Tensor, tokens: Sequence[int], counts: Sequence[int], vocabulary: int
) -> list[TokenLogprob]:
    """Score one token per row; `SCORED_ROWS` rows are normalised at a time.

    Both numbers of a row are read from the same float32 log-softmax, so that a client may find out
    by equality whether a token is the likeliest.

    Args:
        logits: [n, V], as the model gave them, before temperature, penalties and masks.
        tokens: [n] ids.
        counts: [n] how many alternatives to list; 0 = none.
        vocabulary: Tokens that have a text; V may be padded beyond them.
    """
    scored: list[TokenLogprob] = []
    for first in range(0, len(tokens), SCORED_ROWS):
        rows = slice(first, first + SCORED_ROWS)
        scored += _score(logits[rows], tokens[rows], counts[rows], vocabulary)
    return scored


def _score(
    logits: Tensor, tokens: Sequence[int], counts: Sequence[int], vocabulary: int
) -> list[TokenLogprob]:
    logprobs = logits.float().log_softmax(-1)
    index = torch.tensor(tokens, device=logits.device)
    chosen = logprobs.gather(1, index[:, None])[:, 0].tolist()
    most = min(max(counts), vocabulary)
    if most == 0:
        return [TokenLogprob(*pair) for pair in zip(tokens, chosen, strict=True)]
    top = logprobs[:, :vocabulary].topk(most)
    ids, values = top.indices.tolist(), top.values.tolist()
    return [
        TokenLogprob(token, logprob, tuple(zip(ids[row][:k], values[row][:k], strict=True)))
        for row, (token, logprob, k) in enumerate(zip(tokens, chosen, counts, strict=True))
    ]
