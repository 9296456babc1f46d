import math
from pathlib import Path

import numpy as np
import pytest
import torch

from pw.errors import ConfigError, PwError
from pw.evaluation.divergence import Reference
from pw.evaluation.perplexity import cut_chunks, perplexity
from support.scoring import UnigramEngine


def test_chunks_do_not_overlap_and_the_rest_is_dropped() -> None:
    assert cut_chunks(range(11), 3) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert cut_chunks(range(11), 3, limit=2) == [[0, 1, 2], [3, 4, 5]]
    assert cut_chunks(range(5), 4, prefix=[99, 98]) == [[99, 98, 0, 1], [99, 98, 2, 3]]


@pytest.mark.parametrize(
    ("tokens", "length", "message"), [(10, 11, "holds 10 tokens"), (10, 1, "at least 2 tokens")]
)
def test_texts_that_cannot_be_cut(tokens: int, length: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cut_chunks(range(tokens), length)


def test_perplexity_is_exp_of_the_mean_of_chunk_means() -> None:
    engine = UnigramEngine(bits=(8, 7, 6, 5))
    done: list[int] = []
    chunks = cut_chunks([0, 1, 2, 3, 4, 5, 6, 7, 8], 3)
    report = perplexity(engine, chunks, concurrency=2, advance=done.append)
    assert report.chunk_nll == pytest.approx((0.25, 0.55, 0.85))  # text order, not finish order
    assert report.perplexity == pytest.approx(math.exp(0.55))
    assert report.nll.low < 0.55 < report.nll.high
    assert (report.tokens, report.chunk_tokens) == (6, 3)
    assert report.chunk_bits == (5.0, 7.0, 6.0)  # the first chunk is the last one done
    assert report.mean_bits == pytest.approx((7 + 6 + 5) / 3)
    assert (report.policy, report.preemptions) == ("static:4", 3)
    assert report.kl is report.chunk_kl is report.kl_quantiles is None
    assert engine.most_in_flight == 2
    assert sum(done) == 3


def test_a_forced_prefix_is_not_scored() -> None:
    chunks = cut_chunks([0, 1, 2, 3], 4, prefix=[50, 60])
    report = perplexity(UnigramEngine(), chunks, prefix=2)
    assert report.chunk_nll == pytest.approx((0.15, 0.35))
    assert report.tokens == 4


def test_a_chunk_that_fails_fails_the_run() -> None:
    with pytest.raises(PwError, match="chunk 1 could not be scored: non-finite logits"):
        perplexity(UnigramEngine(fail_on="chunk-1"), cut_chunks(range(9), 3))


@pytest.mark.parametrize("prefix", [[], [50, 60]])
def test_the_divergence_is_that_of_the_whole_distribution(
    prefix: list[int], tmp_path: Path
) -> None:
    """Every token has the same distribution, so the mean is one known divergence."""
    dense, other = torch.randn(128, dtype=torch.float64), torch.randn(128, dtype=torch.float64)
    p, q = dense.log_softmax(-1), other.log_softmax(-1)
    expected = float((p.exp() * (p - q)).sum())
    chunks = cut_chunks(range(40), 8, prefix=prefix)
    first = max(len(prefix), 1)
    with Reference(len(chunks), 8 - first, tmp_path) as kept:
        kept_by = UnigramEngine(dense, policy="dense", bits=None)
        report = perplexity(kept_by, chunks, prefix=len(prefix), reference=kept, is_reference=True)
        assert report.kl is None  # of itself
        found = perplexity(UnigramEngine(other), chunks, prefix=len(prefix), reference=kept)
    assert found.chunk_kl == pytest.approx([expected] * len(chunks), rel=2e-3)
    assert found.kl is not None
    assert found.kl_quantiles is not None
    assert found.kl.mean == pytest.approx(float(np.mean(found.chunk_kl or ())))
    assert found.kl_quantiles["1"] >= found.kl_quantiles["0.5"] > 0
