"""Perplexity through the engine's own front door: what users are served is what is scored.

Protocol (GPTQ lineage): the text is tokenized once and cut into non-overlapping chunks; each chunk
is a prompt of its own, its first token has no target; perplexity = exp(mean over chunks of the mean
negative log-probability of a chunk's tokens). Knows tokens, not text.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from pw.engine.request import BytesByClass, EngineStatus, RequestOutput, SamplingParams
from pw.errors import ConfigError, PwError
from pw.evaluation.bootstrap import Interval, mean_interval

_SCORE = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, ignore_eos=True)


class ScoringEngine(Protocol):
    """What scoring needs of the engine."""

    def add_request(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams
    ) -> None:
        """Queue one prompt."""

    def step(self) -> list[RequestOutput]:
        """Run one forward step."""

    def status(self) -> EngineStatus:
        """A snapshot."""


@dataclass(frozen=True)
class PerplexityReport:
    """Quality and cost of one policy on one text."""

    policy: str
    perplexity: float
    nll: Interval  # mean negative log-probability of a token in nats
    chunk_nll: tuple[float, ...]  # per chunk, in text order: what paired intervals need
    chunk_tokens: int  # tokens of one chunk, a forced prefix included
    tokens: int  # scored tokens
    mean_bits: float  # of the routed weights, mean over chunks of the bits when it was scored
    bytes: BytesByClass  # at the end of the run
    bytes_over_budget: int  # worst seen
    preemptions: int
    transitions: int
    seconds: float


def cut_chunks(
    token_ids: Sequence[int], length: int, *, prefix: Sequence[int] = (), limit: int | None = None
) -> list[list[int]]:
    """Non-overlapping chunks of exactly `length` tokens; what is left at the end is dropped.

    Args:
        token_ids: The whole text.
        length: Tokens of a chunk, prefix included.
        prefix: Tokens put before each chunk (the BOS of models that need one).
        limit: Chunks at most, taken from the start.

    Raises:
        ConfigError: The text does not fill one chunk.
    """
    step = length - len(prefix)
    if step < 2:
        raise ConfigError(f"a chunk needs at least {len(prefix) + 2} tokens: {length}")
    starts = range(0, len(token_ids) - step + 1, step)[:limit]
    if not starts:
        raise ConfigError(
            f"text holds {len(token_ids)} tokens, one chunk takes {step}",
            "use more text or a smaller --seqlen",
        )
    return [[*prefix, *token_ids[start : start + step]] for start in starts]


def perplexity(
    engine: ScoringEngine,
    chunks: Sequence[list[int]],
    *,
    prefix: int = 0,
    concurrency: int = 4,
    advance: Callable[[int], None] = lambda _count: None,
) -> PerplexityReport:
    """Score chunks of equal length.

    Args:
        engine: Runs them under its own precision policy and budget.
        chunks: Each a prompt.
        prefix: Leading tokens of each chunk that are not scored; the first never is.
        concurrency: Chunks in flight at a time.
        advance: Called with the number of chunks done since the last call.

    Raises:
        PwError: The engine failed on a chunk.
    """
    started = time.monotonic()
    scores: dict[int, tuple[float, float]] = {}
    first = max(prefix, 1)
    for index, output in _run(engine, chunks, concurrency):
        if output.error is not None:
            raise PwError(f"chunk {index} could not be scored: {output.error}")
        if output.prompt_logprobs:
            scored = [p.logprob for p in output.prompt_logprobs[first:] if p is not None]
            if len(scored) != len(chunks[index]) - first:
                raise PwError(f"chunk {index} came back with {len(scored)} log-probabilities")
            scores[index] = (-math.fsum(scored) / len(scored), output.mean_bits)
        if output.finish_reason is not None:
            advance(1)
    chunk_nll = tuple(scores[index][0] for index in range(len(chunks)))
    nll = mean_interval(chunk_nll)
    status = engine.status()
    return PerplexityReport(
        policy=status.policy,
        perplexity=math.exp(nll.mean),
        nll=nll,
        chunk_nll=chunk_nll,
        chunk_tokens=len(chunks[0]),
        tokens=sum(len(chunk) - first for chunk in chunks),
        mean_bits=math.fsum(bits for _, bits in scores.values()) / len(scores),
        bytes=status.bytes,
        bytes_over_budget=status.bytes_over_budget,
        preemptions=status.preemptions,
        transitions=status.transitions,
        seconds=time.monotonic() - started,
    )


def _run(
    engine: ScoringEngine, chunks: Sequence[list[int]], concurrency: int
) -> Iterator[tuple[int, RequestOutput]]:
    """Keep `concurrency` chunks in flight; yields (chunk, output) as the engine steps."""
    waiting = iter(range(len(chunks)))
    flying: set[int] = set()
    while True:
        while len(flying) < concurrency and (index := next(waiting, None)) is not None:
            engine.add_request(f"chunk-{index}", chunks[index], _SCORE)
            flying.add(index)
        if not flying:
            return
        for output in engine.step():
            index = int(output.request_id.removeprefix("chunk-"))
            yield index, output
            if output.finish_reason is not None:
                flying.discard(index)
