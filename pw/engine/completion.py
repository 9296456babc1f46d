"""Requests run to their ends in one call: what `pw generate`, `pw eval` and tests ask for."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from pw.engine.request import FinishReason, RequestOutput, SamplingParams, TokenLogprob


@dataclass(frozen=True)
class Completion:
    """All of one request's output."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob | None, ...]
    error: str | None = None


class Steps(Protocol):
    """What is asked of an engine here."""

    @property
    def has_room(self) -> bool:
        """Whether the queue takes another request."""

    def add_request(
        self, request_id: str, prompt_token_ids: Seq[int], params: SamplingParams
    ) -> None:
        """Queue a request."""

    def abort(self, request_id: str) -> RequestOutput | None:
        """Drop a request."""

    def has_work(self) -> bool:
        """Whether a request is in the engine."""

    def step(self) -> list[RequestOutput]:
        """What one forward pass adds."""


def complete(
    engine: Steps, name: str, prompts: Seq[Seq[int]], params: Seq[SamplingParams]
) -> list[Completion]:
    """Run prompts through an engine that has nothing else to do.

    Args:
        engine: Takes them in as its queue allows.
        name: Their ids begin with it.
        prompts: Token ids.
        params: One for each prompt.

    Returns:
        Completions in the order of the prompts.

    Raises:
        RequestError: A prompt is refused; none of the others is left in the engine.
    """
    ids = [f"{name}-{number}" for number in range(len(prompts))]
    later = deque(zip(ids, prompts, params, strict=True))
    outputs: dict[str, list[RequestOutput]] = {name: [] for name in ids}
    try:
        while later or engine.has_work():
            while later and engine.has_room:
                engine.add_request(*later.popleft())
            for output in engine.step():
                if output.request_id in outputs:  # not of a call that was broken off
                    outputs[output.request_id].append(output)
    except BaseException:
        for request_id in ids:
            engine.abort(request_id)
        raise
    return [_join(outputs[request_id]) for request_id in ids]


def _join(outputs: list[RequestOutput]) -> Completion:
    last = outputs[-1]
    assert last.finish_reason is not None
    return Completion(
        tuple(token for output in outputs for token in output.token_ids),
        "".join(output.text for output in outputs),
        last.finish_reason,
        tuple(entry for output in outputs for entry in output.logprobs),
        tuple(entry for output in outputs for entry in output.prompt_logprobs),
        last.error,
    )
