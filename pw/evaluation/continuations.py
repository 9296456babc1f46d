"""Log-probability of a text as the continuation of another: what choice tasks are made of.

A pair is split into tokens as lm-evaluation-harness does it: blanks at the end of the context move
to the continuation, both are tokenized together, and what the context alone takes is its share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from pw.engine.request import RequestOutput, SamplingParams
from pw.errors import ConfigError, PwError
from pw.evaluation.inflight import Stepper, run_in_flight

_SCORE = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=1)


class Encoder(Protocol):
    """The part of a tokenizer that is needed."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""


@dataclass(frozen=True)
class Pair:
    """Token ids of a context and of what follows it."""

    context: list[int]
    continuation: list[int]


@dataclass(frozen=True)
class Score:
    """How likely a continuation is."""

    logprob: float  # summed over its tokens, in nats
    greedy: bool  # whether each of its tokens is the likeliest at its place
    bits: float  # mean bits of the routed weights when it was scored


def encode_pair(
    tokenizer: Encoder, context: str, continuation: str, prefix: Sequence[int] = ()
) -> Pair:
    """Split a context and its continuation into tokens.

    Args:
        tokenizer: Of the model.
        context: What the model is given.
        continuation: What is scored.
        prefix: Tokens put before the context (the BOS of models that need one).

    Raises:
        ConfigError: One of them is empty, or the continuation has no token of its own.
    """
    bare = context.rstrip()
    context, continuation = bare, context[len(bare) :] + continuation
    if not (context or prefix) or not continuation:
        raise ConfigError(
            f"context and continuation must not be empty: `{context[-40:]}`, `{continuation[:40]}`"
        )
    count = len(tokenizer.encode(context, add_special_tokens=False))
    whole = tokenizer.encode(context + continuation, add_special_tokens=False)
    if len(whole) <= count:
        raise ConfigError(f"a continuation that adds no token cannot be scored: `{continuation}`")
    return Pair([*prefix, *whole[:count]], whole[count:])


def score_pairs(
    engine: Stepper,
    pairs: Sequence[Pair],
    *,
    max_model_len: int,
    concurrency: int = 4,
    advance: Callable[[int], None] = lambda _count: None,
) -> list[Score]:
    """Score every pair; the engine has no other requests.

    Pairs that follow each other with the same context share its KV where prefixes are cached.
    A context that is too long loses tokens at its beginning.

    Args:
        engine: Runs them.
        pairs: What to score.
        max_model_len: Tokens of a prompt at most.
        concurrency: Pairs in flight at a time.
        advance: Called with the number of pairs done since the last call.

    Raises:
        PwError: The engine failed on a pair, or a continuation alone is too long.
    """
    prompts = [cut_context(pair, max_model_len) for pair in pairs]
    params = [
        replace(_SCORE, prompt_logprobs_start=len(prompt) - len(pair.continuation))
        for prompt, pair in zip(prompts, pairs, strict=True)
    ]
    found: dict[int, Score] = {}
    parts: dict[int, list[RequestOutput]] = {}
    for index, output in run_in_flight(
        engine, prompts, params, concurrency=concurrency, what="item"
    ):
        parts.setdefault(index, []).append(output)
        if output.finish_reason is not None:
            found[index] = _score(parts.pop(index), len(pairs[index].continuation), index)
            advance(1)
    return [found[index] for index in range(len(pairs))]


def cut_context(pair: Pair, max_model_len: int) -> list[int]:
    """The prompt of a pair: context, cut at its beginning where need be, and continuation.

    Raises:
        PwError: No token of the context would be left.
    """
    room = max_model_len - len(pair.continuation)
    if room < 1:
        raise PwError(
            f"a continuation of {len(pair.continuation)} tokens does not fit into a context of "
            f"{max_model_len}",
            "raise --max-model-len or --memory-budget",
        )
    return [*pair.context[-room:], *pair.continuation]


def _score(outputs: Sequence[RequestOutput], count: int, index: int) -> Score:
    """Of the last `count` prompt tokens of a request."""
    entries = [entry for output in outputs for entry in output.prompt_logprobs][-count:]
    scored = [entry for entry in entries if entry is not None]
    if len(scored) != count:
        raise PwError(f"item {index} came back with {len(scored)} of {count} log-probabilities")
    return Score(
        logprob=math.fsum(entry.logprob for entry in scored),
        greedy=all(entry.logprob == entry.top[0][1] for entry in scored),
        bits=outputs[-1].mean_bits,
    )
