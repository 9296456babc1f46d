"""The step loop: commit, plan, schedule, run, sample, hand out. Plans and copies nothing itself.

One step:

    safe point   landed raises are committed, pressure policy and planner move planes
    schedule     which tokens run; pages for them (relief when pages run out)
    run          one forward pass over the packed batch
    sample       next tokens, text, ends

Between two steps nothing reads the arena: that is where bits may change. On a GPU this means the
order of its stream: steps may be launched before the last is read (`pw.engine.launching`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence as Seq
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pw.config import EngineConfig
from pw.engine.admission import Admission
from pw.engine.completion import Completion, complete
from pw.engine.computing import Computed, Flight, StepComputer
from pw.engine.integrity import check_books
from pw.engine.launching import Launcher
from pw.engine.outputs import Widths, accept_token, finish_without_token
from pw.engine.precision.switch import switch_policy
from pw.engine.process.wire import EngineInfo
from pw.engine.request import (
    EngineStatus,
    FinishReason,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
)
from pw.engine.runner import PromptLogits
from pw.engine.sampling.grammar_queue import GrammarQueue
from pw.engine.sampling.sampler import Sampler
from pw.engine.sequence import Chunk, Sequence
from pw.engine.start.build import Parts, build_parts
from pw.engine.start.probe import refuse_overflow
from pw.engine.status import Counters, concurrency, precision_map, snapshot
from pw.errors import RequestError
from pw.memory.prefix_cache import PrecisionTag
from pw.models.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_WAIT_SECONDS = 0.005  # for a grammar when there is nothing else to do


class Engine:
    """A model inside a memory budget. `AsyncEngine` gives it a thread.

    One thread calls it; `status` alone may be called from others.
    """

    def __init__(self, parts: Parts, config: EngineConfig) -> None:
        self._parts, self._config = parts, config
        self.tokenizer: Tokenizer = parts.tokenizer
        self.model_name: str = parts.model_name
        self._eos = frozenset(parts.tokenizer.eos_token_ids)
        self._admission = Admission(parts, config)
        self._grammars = GrammarQueue(parts.tokenizer, parts.tokenizer.vocab_size)
        sampler = Sampler(parts.tokenizer.vocab_size, self._eos)
        self._computer = StepComputer(parts.runner, sampler, parts.quality)
        # Held while pages and queues change, not while the model runs: what `status` sees adds up.
        self._books = threading.Lock()
        self._launcher = Launcher(parts, config, self._computer, self._books, self._give_up)
        self._sequences: dict[str, Sequence] = {}
        self._counters = Counters()
        self._outputs: list[RequestOutput] = []  # not yet handed out: a fault loses none
        self._generated = 0
        self._last_step_time = time.monotonic()
        self._blaming = nullcontext if parts.team is None else parts.team.blaming

    @classmethod
    def from_artifact(cls, path: str | Path, config: EngineConfig) -> Engine:
        """Load an artifact and divide the budget.

        Raises:
            StoreError: The artifact is missing, damaged or lacks what the policy needs.
            BudgetError: Weights at their least widths and one short sequence do not fit.
            ConfigError: A setting cannot be honoured.
        """
        parts = build_parts(Path(path), config)
        engine = cls(parts, config)
        refuse_overflow(engine, parts.skeleton.dtype)
        engine._counters = Counters()  # a probe is no request
        return engine

    # -- requests --------------------------------------------------------------------------

    def add_request(
        self, request_id: str, prompt_token_ids: Seq[int], params: SamplingParams
    ) -> None:
        """Queue a request.

        Raises:
            RequestError: It is empty, names unknown tokens, could never fit, or the queue is full.
        """
        if request_id in self._sequences:
            raise ValueError(f"request id is in use: {request_id}")
        sequence = self._admission.admit(request_id, prompt_token_ids, params, self._waiting)
        with self._books:
            self._queue(sequence)
        if self._config.trace_requests:
            self._parts.trace.write(
                "request",
                step=self._launcher.step,
                id=request_id,
                prompt=sequence.prompt,
                params=asdict(params),
            )

    def abort(self, request_id: str) -> RequestOutput | None:
        """Drop a request and free its pages at once; its last output, None if unknown."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return None
        with self._books:
            output = self._end(sequence, "abort")
            self._launcher.drop_dead()
        if self._config.trace_requests:
            self._parts.trace.write("abort", step=self._launcher.step, id=request_id)
        return output

    def fail_running(self, error: str, code: str) -> list[RequestOutput]:
        """End every running request, after a fault that none of them can be told to have caused.

        Args:
            error: One line for the clients.
            code: Goes into `error_code`.
        """
        with self._books:
            running = list(self._parts.scheduler.running)
            outputs = [self._end(sequence, "error", error, code) for sequence in running]
            self._launcher.drop_dead()
        return outputs

    def waits(self, request_id: str) -> bool:
        """Whether a request is in the queue and nothing of it has been computed yet."""
        sequence = self._sequences.get(request_id)
        return sequence is not None and sequence.kv is None and sequence.seen == 0

    @property
    def has_room(self) -> bool:
        """Whether the queue takes another request."""
        return self._waiting < self._config.max_num_queued_reqs

    def has_work(self) -> bool:
        """Whether a step would do anything for a request."""
        return bool(self._sequences or self._outputs)

    # -- the loop --------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Advance all running requests by one forward pass; what is new, per request.

        Where steps overlap, the next one has been launched when this returns.

        Raises:
            EngineLostError: The device or another rank is lost.
        """
        with self._blaming():
            with self._books:
                self._queue_compiled()
            flight = self._launcher.next()
            if flight is None:
                if self._grammars and not self._outputs:
                    self._grammars.wait(_WAIT_SECONDS)
                return self._hand_out()
            self._launcher.go_ahead(flight)
            computed = self._computer.read(flight)
            with self._books:
                self._take_step_in(flight, computed)
                self._launcher.drop_dead()
                self._last_step_time = time.monotonic()
            return self._hand_out()

    def idle_turn(self) -> bool:
        """A safe point without a step, for planes that may come back while nothing runs.

        Returns:
            Whether later turns would do more.
        """
        self._launcher.safe_point(idle=True)
        return self._parts.precision.pending

    def generate(
        self, prompts: Seq[Seq[int]], params: SamplingParams | Seq[SamplingParams]
    ) -> list[Completion]:
        """Run prompts to their ends, batched; completions in the order of the prompts.

        Raises:
            RequestError: A prompt is refused; none of the others is left in the engine.
            ValueError: The engine has other requests.
        """
        if self._sequences:
            raise ValueError(f"the engine has {len(self._sequences)} other requests")
        self._generated += 1
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        return complete(self, f"generate-{self._generated}", prompts, each)

    def observe_prompt_logits(self, observer: PromptLogits | None) -> None:
        """Show the logits of prompt tokens whose log-probabilities are wanted to `observer`.

        It is called in the middle of a step, from the thread that steps.
        """
        self._parts.runner.observer = observer

    def set_policy(self, policy: str) -> None:
        """Follow `adaptive` or `static:<bits>` from the next step on.

        Raises:
            RequestError: The engine was started with another kind of policy, or the width does
                not fit beside the longest context.
        """
        with self._books:
            found = switch_policy(self._parts, self._config, policy)
            self._config = replace(self._config, policy=found)
        self._parts.trace.write("policy", step=self._launcher.step, policy=policy)

    def reset_prefix_cache(self) -> None:
        """Forget every prefix; requests that use one keep it to their end."""
        with self._books:
            if self._parts.kv.prefix is not None:
                self._parts.kv.prefix.clear()

    def close(self, *, lost: bool = False) -> None:
        """Close the trace, end the threads that compile and plan and the other ranks.

        `lost`: this process ends at once, and its device is left alone, as it may be lost.
        """
        for part in (self._grammars, self._parts.precision, self._parts.trace):
            part.close()
        if self._parts.team is not None and lost:
            self._parts.team.abandon()
        elif self._parts.team is not None:
            self._parts.runner.release()  # ranks do not part while graphs hold their sums
            self._parts.team.close()

    # -- looking ---------------------------------------------------------------------------

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together that any request may have."""
        return self._parts.memory.max_model_len

    def pages_for_tokens(self, tokens: int) -> int:
        """Most KV pages that one request holds at once on its way to a length."""
        return self._parts.kv.pages_for_tokens(tokens)

    def info(self) -> EngineInfo:
        """What does not change while the engine lives."""
        parts, status = self._parts, self.status()
        return EngineInfo(
            model_name=parts.model_name,
            artifact_hash=parts.artifact_hash,
            policy=status.policy,
            vocab_size=parts.skeleton.vocab_size,
            max_model_len=status.max_model_len,
            page_bytes=status.page_bytes,
            pages_total=status.pages_total,
            geometry=parts.skeleton.geometry,
            bytes=status.bytes,
            concurrency=concurrency(parts, self._config),
        )

    def precision_map(self) -> dict[str, Any]:
        """Bits of every block and what every page holds; see `pw.engine.status.precision_map`."""
        with self._books:
            return precision_map(self._parts)

    def status(self) -> EngineStatus:
        """A snapshot. Safe to take from another thread while a step runs."""
        with self._books:
            return snapshot(
                self._parts,
                self._config,
                self._counters,
                self._waiting,
                self._launcher.step,
                self._last_step_time,
            )

    def check_integrity(self) -> None:
        """Check every invariant of DESIGN section 6.

        Raises:
            AssertionError: One does not hold.
        """
        check_books(self._parts, self.status())

    # -- inside ----------------------------------------------------------------------------

    def _hand_out(self) -> list[RequestOutput]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def _give_up(self, sequence: Sequence, reason: str) -> None:
        """End the next request: the bits that it asks for are not to be had."""
        self._outputs.append(self._end(sequence, "error", reason, "precision_unavailable"))

    @property
    def _waiting(self) -> int:
        """Requests of which nothing runs."""
        return len(self._parts.scheduler.waiting) + len(self._grammars)

    def _queue(self, sequence: Sequence) -> None:
        """Let a new sequence wait for its turn, or first for its grammar."""
        if sequence.params.grammar is None:
            self._parts.scheduler.waiting.append(sequence)
        else:
            self._grammars.add(sequence)
        self._sequences[sequence.request_id] = sequence

    def _queue_compiled(self) -> None:
        """Let sequences whose grammar is ready wait for their turn; end the others."""
        for sequence, error in self._grammars.take():
            if error is None:
                self._parts.scheduler.waiting.append(sequence)
            else:
                self._outputs.append(self._end(sequence, "error", str(error), error.code))

    def _take_step_in(self, flight: Flight, computed: Computed) -> None:
        """Book a step, and what it adds to each sequence that was at its end and still runs."""
        parts, tag = self._parts, flight.tag
        if flight.broken is not None:
            tag = tag.merged(parts.scheduler.precision())  # it was computed again, just now
        booked = [chunk for chunk in computed.chunks if chunk.lives]
        for chunk in booked:
            parts.scheduler.book(chunk, tag)
            scored = computed.scored.get(chunk, [])
            self._counters.prompt_tokens += chunk.sequence.see(chunk.start + chunk.count, scored)
            if parts.quality is not None:
                parts.quality.close_prompt(chunk.sequence, parts.kv)
        for of_one in zip(computed.ready, computed.tokens, computed.logprobs, strict=True):
            if of_one[0].lives:
                self._outputs.append(self._take_in(*of_one, widths=_widths(tag)))
        for sequence, error in computed.failed:
            self._outputs.append(self._end(sequence, "error", error, "engine_failed"))
        if parts.quality is not None:
            parts.quality.after_step(parts.scheduler.running, computed.passes)
        self._counters.count_step(sum(chunk.count for chunk in booked))

    def _take_in(
        self, chunk: Chunk, token: int | None, logprob: TokenLogprob | None, *, widths: Widths
    ) -> RequestOutput:
        """Book the next token of a sequence."""
        sequence = chunk.sequence
        if token is None:
            self._counters.nonfinite += 1
            place = self._parts.runner.first_not_finite(chunk)
            if self._parts.quality is not None:
                self._parts.quality.drop_pass()  # it was no step
            logger.error("request %s: logits are not finite: %s", sequence.request_id, place)
            error = "the model gave logits that are not finite"
            return self._end(sequence, "error", error, "nonfinite")
        if sequence.max_tokens == 0:
            return self._end(sequence, "length")
        try:
            output = accept_token(sequence, token, logprob, self._eos, widths)
        except RequestError as refused:
            return self._end(sequence, "error", refused.message, refused.code)
        except Exception as error:
            logger.exception("request %s: a token could not be taken in", sequence.request_id)
            return self._end(sequence, "error", type(error).__name__, "engine_failed")
        self._counters.generation_tokens += 1
        if output.finish_reason is not None:
            self._counters.count(output.finish_reason)
            self._forget(sequence)
        return output

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        error: str | None = None,
        code: str | None = None,
    ) -> RequestOutput:
        """End a sequence without a further token."""
        self._counters.count(reason)
        self._forget(sequence, keep=reason != "error")
        widths = _widths(self._parts.scheduler.precision())
        return finish_without_token(sequence, reason, widths, error, code)

    def _forget(self, sequence: Sequence, *, keep: bool = True) -> None:
        self._grammars.drop(sequence)
        self._parts.scheduler.finish(sequence, keep=keep)
        del self._sequences[sequence.request_id]


def _widths(tag: PrecisionTag) -> Widths:
    return Widths(tag.mean_bits, tag.least_bits)
