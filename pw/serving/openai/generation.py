"""The sequences of one HTTP request while the engine runs them: merged, timed, cleaned up."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import ClientDisconnect

from pw.engine.request import RequestOutput, SamplingParams
from pw.errors import RequestError
from pw.serving.errors import GenerationError
from pw.serving.limits import ServingLimits, shutting_down, timed_out
from pw.serving.openai.prompts import EncodedPrompt
from pw.serving.operations.log_lines import RequestRecord, log_request
from pw.serving.operations.metrics import SequenceTimer, ServingMetrics
from pw.serving.process.engine_protocol import AsyncEngineProtocol


@dataclass(frozen=True)
class SequenceSpec:
    """One choice of one prompt."""

    prompt: EncodedPrompt
    params: SamplingParams


def choices_of(prompts: list[EncodedPrompt], params: SamplingParams, n: int) -> list[SequenceSpec]:
    """All sequences of a request, prompt by prompt; their place is the choice's `index`.

    Choice i of a prompt is seeded with `seed + i`, so it depends on neither the other prompts of
    the call nor on `n`.
    """
    return [
        SequenceSpec(prompt, _with_seed(params, choice))
        for prompt in prompts
        for choice in range(n)
    ]


def check_context(prompts: list[EncodedPrompt], params: SamplingParams, max_model_len: int) -> None:
    """Refuse prompts that leave no room for what they ask for.

    Raises:
        RequestError: `context_length_exceeded`, with the numbers.
    """
    for prompt in prompts:
        tokens = len(prompt.token_ids)
        wanted = params.max_tokens if params.max_tokens is not None else 1
        if tokens + wanted > max_model_len:
            raise RequestError(
                f"this model's maximum context length is {max_model_len} tokens, but the request "
                f"needs {tokens + wanted}: {tokens} in the prompt and {wanted} to generate",
                code="context_length_exceeded",
                param="max_tokens" if tokens < max_model_len else "prompt",
            )


class Generation:
    """Runs sequences and yields `(index, output)` in order of arrival until all have finished.

    Use as an async context manager: leaving it aborts what still runs, and logs one line.

    Args:
        engine: Runs the sequences.
        metrics: Counts and times them.
        open_generations: This one is in it while it runs, so that a server can end them all.
        request_id: Prefix of the engine's ids; unique in this process.
        sequences: What to run.
        limits: How many outputs wait to be read before the engine must.
        deadline: When it fails with a timeout, on the event loop's clock; None: never.
        arrived: When the request came, in monotonic seconds: its times count from there. None: now.
    """

    def __init__(
        self,
        engine: AsyncEngineProtocol,
        metrics: ServingMetrics,
        open_generations: set[Generation],
        request_id: str,
        sequences: list[SequenceSpec],
        *,
        limits: ServingLimits,
        deadline: float | None = None,
        arrived: float | None = None,
    ) -> None:
        self._engine = engine
        self._open = open_generations
        self.request_id = request_id
        self._sequences = sequences
        self._timers = [
            SequenceTimer(metrics, len(each.prompt.token_ids), arrived) for each in sequences
        ]
        self._outputs: asyncio.Queue[tuple[int, RequestOutput] | Exception] = asyncio.Queue(
            limits.buffered_outputs * len(sequences)
        )
        self._limits = limits
        self._deadline = deadline
        self._timeout: asyncio.TimerHandle | None = None
        self._running = len(sequences)
        self._tasks: list[asyncio.Task[None]] = []
        self._failed = False  # from outside
        self._unfinished = "aborted"  # what the log calls sequences without an end of their own

    async def __aenter__(self) -> Generation:
        self._open.add(self)
        if self._deadline is not None:
            error = timed_out(self._limits.request_timeout or 0.0)
            loop = asyncio.get_running_loop()
            self._timeout = loop.call_at(self._deadline, self.fail, error)
        self._tasks = [
            asyncio.create_task(self._pump(index, spec))
            for index, spec in enumerate(self._sequences)
        ]
        return self

    async def __aexit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._open.discard(self)
        if self._timeout is not None:
            self._timeout.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        gone = (ClientDisconnect, asyncio.CancelledError)
        left = error is not None and issubclass(error, gone) and not self._failed
        if left:
            self._unfinished = "gone"
        refused = self._unfinished == "refused"  # counted as such, and with it those that wait
        for timer in self._timers:
            timer.close(None if refused and timer.waits else "client" if left else "error")
        self._log()

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> tuple[int, RequestOutput]:
        """The next output.

        Raises:
            RequestError: The engine refuses a sequence, or the server stops.
            GenerationError: The engine failed at a sequence.
        """
        if not self._running:
            raise StopAsyncIteration
        item = await self._outputs.get()
        if isinstance(item, Exception):
            raise item
        if item[1].finish_reason is not None:
            self._running -= 1
        return item

    def fail(self, error: Exception) -> None:
        """Make the reader's next step raise `error`; what it has not read is dropped."""
        self._failed = True
        while not self._outputs.empty():
            self._outputs.get_nowait()
        self._outputs.put_nowait(error)

    async def _pump(self, index: int, spec: SequenceSpec) -> None:
        sequence_id = f"{self.request_id}-{index}"
        timer = self._timers[index]
        try:
            outputs: Any = self._engine.generate(sequence_id, spec.prompt.token_ids, spec.params)
            async with aclosing(outputs):
                async for output in outputs:
                    timer.record(output)
                    await self._outputs.put(_checked(index, output))
                    if output.finish_reason is not None:
                        return
            raise GenerationError("engine ended the sequence without a reason")
        except RequestError as error:
            self._unfinished = "refused"
            await self._outputs.put(_in_words_of_the_request(error))
        except Exception as error:
            await self._outputs.put(error)
        finally:
            if timer.finish_reason is None:
                self._engine.abort(sequence_id)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of its sequences that have no token yet."""
        return sum(timer.prompt_tokens for timer in self._timers if timer.waits)

    def describe(self) -> dict[str, Any]:
        """Its state for people who watch: counts and times, no text."""
        first = self._timers[0]
        return {
            "id": self.request_id,
            "state": "waiting" if first.first_token_seconds is None else "running",
            "sequences": len(self._timers),
            "prompt_tokens": sum(timer.prompt_tokens for timer in self._timers),
            "generated_tokens": sum(timer.completion_tokens for timer in self._timers),
            "age_seconds": first.age_seconds,
            "ttft_seconds": first.first_token_seconds,
            "bits": first.last_bits,
        }

    def _log(self) -> None:
        timers, first = self._timers, self._timers[0]
        ends = {timer.finish_reason or self._unfinished for timer in timers}
        log_request(
            RequestRecord(
                request_id=self.request_id,
                sequences=len(timers),
                prompt_tokens=sum(timer.prompt_tokens for timer in timers),
                cached_tokens=sum(timer.cached_tokens for timer in timers),
                generated_tokens=sum(timer.completion_tokens for timer in timers),
                finish_reason=",".join(sorted(ends)),
                queue_seconds=first.queue_seconds,
                ttft_seconds=first.first_token_seconds,
                e2e_seconds=max(timer.seconds for timer in timers),
                bits_start=first.first_bits or None,
                bits_end=first.last_bits or None,
                bits_min=min(filter(None, (timer.least_bits for timer in timers)), default=None),
            )
        )


# Ends that are not the engine's fault, by their code -> HTTP status.
_REFUSALS = {"timeout": 504, "invalid_grammar": 400, "precision_unavailable": 503}


def _checked(index: int, output: RequestOutput) -> tuple[int, RequestOutput] | Exception:
    """An output, or the error that it stands for: clients know neither "abort" nor "error"."""
    if output.finish_reason == "error" and output.error_code in _REFUSALS:
        code = output.error_code
        return RequestError(output.error or code, code=code, status=_REFUSALS[code])
    if output.finish_reason == "error":
        code = output.error_code or "server_error"
        return GenerationError(output.error or "unknown reason", code)
    if output.finish_reason == "abort":
        return shutting_down()
    return index, output


def _in_words_of_the_request(error: RequestError) -> RequestError:
    """A refusal by the engine, naming the field as clients spell it."""
    if error.param == "min_bits":
        error.param = "precision.min_bits"
    return error


def _with_seed(params: SamplingParams, choice: int) -> SamplingParams:
    if params.seed is None or choice == 0:
        return params
    return replace(params, seed=(params.seed + choice + 2**63) % 2**64 - 2**63)
