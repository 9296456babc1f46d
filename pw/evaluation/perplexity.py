"""Perplexity through the engine's own front door: what users are served is what is scored.

Protocol (GPTQ lineage): the text is tokenized once and cut into non-overlapping chunks; each chunk
is a prompt of its own, its first token has no target; perplexity = exp(mean over chunks of the mean
negative log-probability of a chunk's tokens). Knows tokens, not text.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pw.engine.request import BytesByClass, EngineStatus, SamplingParams
from pw.errors import ConfigError, PwError
from pw.evaluation.bootstrap import Interval, mean_interval
from pw.evaluation.divergence import Reference
from pw.evaluation.inflight import ScoringEngine, run_in_flight
from pw.evaluation.watch import Usage, Watch

_SCORE = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=0)


@dataclass(frozen=True)
class PerplexityReport:
    """Quality and cost of one policy on one text."""

    policy: str
    perplexity: float
    nll: Interval  # mean negative log-probability of a token in nats
    chunk_nll: tuple[float, ...]  # per chunk, in text order: what paired intervals need
    chunk_bits: tuple[float, ...]  # mean bits of the routed weights when the chunk was done
    chunk_tokens: int  # tokens of one chunk, a forced prefix included
    tokens: int  # scored tokens
    kl: Interval | None  # mean divergence of a token from the dense model in nats
    chunk_kl: tuple[float, ...] | None
    kl_quantiles: dict[str, float] | None  # of single tokens: "0.5", "0.99", "0.999", "1"
    usage: Usage
    bytes_over_budget: int  # worst seen
    preemptions: int
    transitions: int
    seconds: float

    @property
    def mean_bits(self) -> float:
        """Bits of a routed weight, mean over chunks of the bits when each was scored."""
        return math.fsum(self.chunk_bits) / len(self.chunk_bits)

    @property
    def bytes(self) -> BytesByClass:
        """Where the bytes of the budget were, mean over the forward steps."""
        return self.usage.bytes


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
    reference: Reference | None = None,
    is_reference: bool = False,
) -> PerplexityReport:
    """Score chunks of equal length.

    Args:
        engine: Runs them under its own precision policy and budget.
        chunks: Each a prompt.
        prefix: Leading tokens of each chunk that are not scored; the first never is.
        concurrency: Chunks in flight at a time.
        advance: Called with the number of chunks done since the last call.
        reference: The dense model's distributions, for the divergence from them.
        is_reference: This run is the dense model's: it fills `reference`.

    Raises:
        PwError: The engine failed on a chunk.
    """
    started = time.monotonic()
    first = max(prefix, 1)
    watch = Watch(engine)
    compare = None if reference is None else _Comparison(reference, is_reference, chunks, first)

    def observe(request_id: str, position: int, logits: Tensor) -> None:
        watch.look()
        if compare is not None:
            compare.take(int(request_id.rpartition("-")[2]), position, logits)

    scores: dict[int, tuple[float, float]] = {}
    outputs = run_in_flight(
        engine,
        chunks,
        _SCORE,
        concurrency=concurrency,
        what="chunk",
        after_step=watch.next_step,
    )
    engine.observe_prompt_logits(observe)
    try:
        for index, output in outputs:
            scored = [p.logprob for p in output.prompt_logprobs[first:] if p is not None]
            if len(scored) != len(chunks[index]) - first:
                raise PwError(f"chunk {index} came back with {len(scored)} log-probabilities")
            scores[index] = (-math.fsum(scored) / len(scored), output.mean_bits)
            advance(1)
    finally:
        engine.observe_prompt_logits(None)
    kl = None if compare is None or is_reference else compare.kl
    ordered = [scores[index] for index in range(len(chunks))]
    shape = (len(chunks[0]), sum(len(chunk) - first for chunk in chunks))
    return _report(engine.status(), ordered, shape, kl, watch.usage(), time.monotonic() - started)


def _report(
    status: EngineStatus,
    scores: Sequence[tuple[float, float]],  # (nll, mean bits) of each chunk
    shape: tuple[int, int],  # tokens of a chunk, scored tokens of all
    kl: NDArray[np.float64] | None,  # [chunks, tokens]
    usage: Usage,
    seconds: float,
) -> PerplexityReport:
    chunk_nll, chunk_bits = zip(*scores, strict=True)
    nll = mean_interval(chunk_nll)
    return PerplexityReport(
        policy=status.policy,
        perplexity=math.exp(nll.mean),
        nll=nll,
        chunk_nll=chunk_nll,
        chunk_bits=chunk_bits,
        chunk_tokens=shape[0],
        tokens=shape[1],
        kl=None if kl is None else mean_interval(kl.mean(1).tolist()),
        chunk_kl=None if kl is None else tuple(kl.mean(1).tolist()),
        kl_quantiles=None if kl is None else _quantiles(kl),
        usage=usage,
        bytes_over_budget=status.bytes_over_budget,
        preemptions=status.preemptions,
        transitions=status.transitions,
        seconds=seconds,
    )


class _Comparison:
    """Fills a reference, or the divergence `kl` [chunks, tokens] from it."""

    def __init__(
        self, reference: Reference, fill: bool, chunks: Sequence[list[int]], first: int
    ) -> None:
        self._reference, self._fill, self._first = reference, fill, first
        self.kl: NDArray[np.float64] = np.full((len(chunks), len(chunks[0]) - first), np.nan)

    def take(self, chunk: int, position: int, logits: Tensor) -> None:
        """Logits [n, V] that predict the chunk's tokens from `position` on."""
        logits = logits[max(self._first - position, 0) :]  # of a forced prefix
        place = max(position - self._first, 0)
        if not len(logits):
            return
        if self._fill:
            self._reference.keep(chunk, place, logits)
        else:
            found = self._reference.divergence(chunk, place, logits)
            self.kl[chunk, place : place + len(found)] = found


def _quantiles(values: NDArray[np.float64]) -> dict[str, float]:
    return {f"{q:g}": float(np.quantile(values, q)) for q in (0.5, 0.99, 0.999, 1.0)}
