"""From a sampled token to what the client sees: text, stops, log-probabilities, the end."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import NamedTuple

from pw.engine.request import FinishReason, RequestOutput, TokenLogprob
from pw.engine.sequence import Sequence
from pw.errors import RequestError


class Widths(NamedTuple):
    """Committed bits over the routed weights at a step; without planes those of bfloat16."""

    mean: float = 16.0
    least: int = 16


def accept_token(
    sequence: Sequence,
    token: int,
    logprob: TokenLogprob | None,
    eos_token_ids: frozenset[int],
    widths: Widths,
) -> RequestOutput:
    """Append a sampled token to its sequence and say what is new.

    Raises:
        RequestError: The sequence's grammar has no place for it.
    """
    params = sequence.params
    if sequence.grammar is not None and not sequence.grammar.accept(token):
        raise RequestError(
            "no token of this model continues the grammar", code="invalid_grammar", param="grammar"
        )
    sequence.output.append(token)
    complete = sequence.grammar is not None and sequence.grammar.ended
    is_eos = token in eos_token_ids and (complete or not params.ignore_eos)
    is_end = is_eos or token in params.stop_token_ids
    may_stop = len(sequence.output) >= params.min_tokens
    text = "" if is_end else sequence.detokenizer.append(token, may_stop)
    finish: FinishReason | None = None
    if is_end or complete or sequence.detokenizer.stopped:
        finish = "stop"
    elif sequence.remaining <= 0:
        finish = "length"
    if finish is not None:
        text += sequence.detokenizer.finish()
    return _output(
        sequence,
        text=text,
        token_ids=(token,),
        logprobs=() if logprob is None else (logprob,),
        finish_reason=finish,
        widths=widths,
    )


def finish_without_token(
    sequence: Sequence,
    reason: FinishReason,
    widths: Widths,
    error: str | None = None,
    code: str | None = None,
) -> RequestOutput:
    """The last output of a sequence that gets no further token."""
    text = sequence.detokenizer.finish() if reason != "error" else ""
    output = _output(sequence, text=text, finish_reason=reason, widths=widths)
    return replace(output, error=error, error_code=code)


def blocked_tokens(
    sequence: Sequence, eos_token_ids: frozenset[int], generated: int
) -> tuple[int, ...]:
    """Tokens that may not come yet: ends, while fewer than min_tokens are generated."""
    params = sequence.params
    if generated >= params.min_tokens:
        return ()
    return (*eos_token_ids, *params.stop_token_ids)


def _output(
    sequence: Sequence,
    *,
    widths: Widths,
    text: str = "",
    token_ids: tuple[int, ...] = (),
    logprobs: tuple[TokenLogprob, ...] = (),
    finish_reason: FinishReason | None = None,
) -> RequestOutput:
    prompt_logprobs = tuple(sequence.prompt_logprobs)
    sequence.prompt_logprobs.clear()
    queued, prefill = _waited(sequence)
    return RequestOutput(
        sequence.request_id,
        text=text,
        token_ids=token_ids,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        finish_reason=finish_reason,
        prompt_tokens=len(sequence.prompt),
        cached_tokens=sequence.cached_tokens or 0,
        completion_tokens=len(sequence.output),
        mean_bits=widths.mean,
        min_bits=widths.least,
        queue_seconds=queued,
        prefill_seconds=prefill,
    )


def _waited(sequence: Sequence) -> tuple[float, float]:
    """Seconds in the queue and in prefill, told once."""
    if sequence.told:
        return 0.0, 0.0
    sequence.told = True
    now = time.monotonic()
    started = now if sequence.started is None else sequence.started
    return started - sequence.arrived, now - started
