"""Keeps a fixed number of prompts inside an engine and hands out what comes back. Knows no text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from pw.engine.request import EngineStatus, RequestOutput, SamplingParams
from pw.engine.runner import PromptLogits
from pw.errors import PwError


class Stepper(Protocol):
    """An engine that runs prompts."""

    def add_request(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams
    ) -> None:
        """Queue one prompt."""

    def step(self) -> list[RequestOutput]:
        """Run one forward step."""


class ScoringEngine(Stepper, Protocol):
    """... and can be looked at."""

    def status(self) -> EngineStatus:
        """A snapshot."""

    def precision_map(self) -> dict[str, Any]:
        """Committed bits of every block: `{"layers": [{"layer", "gate_up": [E], "down": [E]}]}`."""

    def observe_prompt_logits(self, observer: PromptLogits | None) -> None:
        """Show the logits of scored prompt tokens to `observer` before they are dropped."""


def run_in_flight(
    engine: Stepper,
    prompts: Sequence[list[int]],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    concurrency: int,
    what: str = "prompt",
    after_step: Callable[[], None] = lambda: None,
) -> Iterator[tuple[int, RequestOutput]]:
    """Run prompts, `concurrency` at a time.

    Args:
        engine: Has no other requests.
        prompts: Token ids of each.
        params: Of all of them, or of each.
        concurrency: Prompts inside the engine at a time.
        what: Name of a prompt in errors and request ids.
        after_step: Called after every forward step.

    Yields:
        (index of the prompt, output) as the engine steps.

    Raises:
        PwError: The engine failed on a prompt.
    """
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    waiting = iter(range(len(prompts)))
    flying: set[int] = set()
    while True:
        while len(flying) < concurrency and (index := next(waiting, None)) is not None:
            engine.add_request(f"{what}-{index}", prompts[index], each[index])
            flying.add(index)
        if not flying:
            return
        outputs = engine.step()
        after_step()
        for output in outputs:
            index = int(output.request_id.removeprefix(f"{what}-"))
            if output.error is not None:
                raise PwError(f"{what} {index} could not be scored: {output.error}")
            if output.finish_reason is not None:
                flying.discard(index)
            yield index, output
