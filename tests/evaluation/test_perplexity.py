import math
from collections import deque

import pytest

from pw.engine.request import EngineStatus, RequestOutput, SamplingParams, TokenLogprob
from pw.errors import ConfigError, PwError
from pw.evaluation.perplexity import cut_chunks, perplexity


class UnigramEngine:
    """Gives token t the log-probability -(t + 1) / 10; finishes one prompt a step, newest first."""

    def __init__(self, fail_on: str = "") -> None:
        self.queue: deque[tuple[str, list[int]]] = deque()
        self.most_in_flight = 0
        self.fail_on = fail_on
        self.bits = 8.0

    def add_request(self, request_id: str, prompt: list[int], params: SamplingParams) -> None:
        assert params.prompt_logprobs == 0
        self.queue.append((request_id, prompt))
        self.most_in_flight = max(self.most_in_flight, len(self.queue))

    def step(self) -> list[RequestOutput]:
        request_id, prompt = self.queue.pop()
        self.bits -= 1
        if request_id == self.fail_on:
            return [RequestOutput(request_id, finish_reason="error", error="non-finite logits")]
        logprobs = (None, *(TokenLogprob(token, -(token + 1) / 10) for token in prompt[1:]))
        return [
            RequestOutput(
                request_id, prompt_logprobs=logprobs, finish_reason="length", mean_bits=self.bits
            )
        ]

    def status(self) -> EngineStatus:
        return EngineStatus(policy="static:4", bytes_over_budget=0, preemptions=3)


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
    engine = UnigramEngine()
    done: list[int] = []
    chunks = cut_chunks([0, 1, 2, 3, 4, 5, 6, 7, 8], 3)
    report = perplexity(engine, chunks, concurrency=2, advance=done.append)
    assert report.chunk_nll == pytest.approx((0.25, 0.55, 0.85))  # text order, not finish order
    assert report.perplexity == pytest.approx(math.exp(0.55))
    assert report.nll.low < 0.55 < report.nll.high
    assert (report.tokens, report.chunk_tokens) == (6, 3)
    assert report.mean_bits == pytest.approx((7 + 6 + 5) / 3)
    assert (report.policy, report.preemptions) == ("static:4", 3)
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
