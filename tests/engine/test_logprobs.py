"""Scores of tokens against a float64 reference."""

import pytest
import torch

from pw.engine.sampling.logprobs import score
from pw.memory.budget import SCORED_ROWS

V = 40


def test_scores_are_those_of_the_whole_row() -> None:
    logits = torch.randn(2 * SCORED_ROWS + 3, V)
    expected = logits.double().log_softmax(-1)
    tokens = [(7 * row) % V for row in range(len(logits))]
    counts = [row % 4 for row in range(len(logits))]
    found = score(logits, tokens, counts, vocabulary=V - 4)()
    for row, entry in enumerate(found):
        assert entry.token_id == tokens[row]
        assert entry.logprob == pytest.approx(float(expected[row, tokens[row]]), abs=1e-6)
        best = expected[row, : V - 4].topk(counts[row])  # padding of the vocabulary never shows
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-6)
    assert len(score(logits[:1], [4], [20], vocabulary=5)()[0].top) == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equality_tells_whether_a_token_is_the_likeliest(dtype: torch.dtype) -> None:
    logits = (torch.randn(500, V) * 3).to(dtype)  # bfloat16 has ties, too
    tokens = [int(row.argmax()) if n % 2 else n % V for n, row in enumerate(logits)]
    for row, entry in zip(logits, score(logits, tokens, [1] * 500, V)(), strict=True):
        is_best = bool(row[entry.token_id] == row.max())
        assert (entry.logprob == entry.top[0][1]) == is_best
