"""Contexts grow until the widest experts no longer fit, then shrink; over and over.

One cycle:

    steady     `probes` short requests decode beside free pages: quiet steps
    pressure   long prompts arrive until planes are given up, and decode to their end
    ease       the probes decode on while planes come back, and are dropped
    rest       nothing runs; until all planes are back

Steps are compared like with like: those that decode the probes and nothing else, by whether planes
moved in them.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from pw.engine import Engine
from pw.engine.request import EngineStatus, SamplingParams
from pw.errors import ConfigError, PwError
from pw.evaluation.bench.long_prompts import LongPrompts
from pw.evaluation.bench.squeeze_settings import PROBE, Squeeze
from pw.memory.page_table import WeightPageTable

_IDLE_SECONDS = 0.002  # between safe points of an idle engine


@dataclass
class _Record:
    """What was seen in one cycle, or in all that have ended."""

    requests: int = 0
    quiet_ms: list[float] = field(default_factory=list)
    moving_ms: list[float] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)  # seconds
    releases: list[float] = field(default_factory=list)  # ms, of calls that freed pages
    writes: list[float] = field(default_factory=list)  # ms, of the narrower LUTs of releases
    released_pages: int = 0
    lowest_bits: float = 16.0
    most_kv: int = 0

    def add(self, cycle: _Record) -> None:
        """Take in a cycle that has ended."""
        self.requests += cycle.requests
        self.quiet_ms += cycle.quiet_ms
        self.moving_ms += cycle.moving_ms
        self.returns += cycle.returns
        self.releases += cycle.releases
        self.writes += cycle.writes
        self.released_pages += cycle.released_pages
        self.lowest_bits = min(self.lowest_bits, cycle.lowest_bits)
        self.most_kv = max(self.most_kv, cycle.most_kv)


@dataclass
class _Wrong:
    """What may not happen, in a cycle that was interrupted neither."""

    over_budget: int = 0
    leaked: int = 0
    not_returned: int = 0
    broken: str | None = None  # what does not hold after an interrupt


def tight_budget(engine: Engine, low_watermark: float) -> int:
    """A budget that holds, at rest, the widths of now and half a context of the longest.

    Args:
        engine: At the widest widths.
        low_watermark: Share of pages that an engine at rest leaves free.
    """
    status = engine.status()
    fixed = status.bytes.total - (status.pages_weights + status.pages_free) * status.page_bytes
    pages = status.pages_weights + engine.pages_for_tokens(engine.max_model_len // 2) + 2
    return fixed + math.ceil(pages / (1 - low_watermark)) * status.page_bytes


class SqueezeRun:
    """Cycles over one engine, whose policy is adaptive.

    Args:
        engine: An engine with nothing to do.
        squeeze: The settings.

    Raises:
        ConfigError: The widest experts do not fit at rest, or fit beside all the KV there can be.
    """

    def __init__(self, engine: Engine, squeeze: Squeeze) -> None:
        self._engine, self._squeeze = engine, squeeze
        self._rng = np.random.default_rng(squeeze.seed)
        self._cycle_record, self._ended, self._wrong = _Record(), _Record(), _Wrong()
        self._names = itertools.count(1)
        engine.generate([self._prompt(8)], SamplingParams(temperature=0.0, max_tokens=2))
        self._settle()
        self._start = engine.status()
        if len(self._start.blocks_by_bits) > 1:
            raise ConfigError(
                f"the widest experts do not fit: mean {self._start.mean_bits:.2f} bits at rest",
                "raise --memory-budget, or lower --max-bits",
            )
        self._long = LongPrompts(engine, squeeze, self._start).lengths()
        self._status_then = self._start  # when the last cycle ended
        self._watch_releases()

    def run(self, advance: Callable[[int], None] = lambda _: None) -> dict[str, Any]:
        """All cycles; a summary.

        After Ctrl-C it says so and is one of the cycles that had ended by then. Only what may not
        happen is counted in the one that was broken off, too.

        Raises:
            KeyboardInterrupt: Before the first has ended.
        """
        probe = self._prompt(PROBE)
        before = self._score(probe)
        started, seconds, interrupted = time.perf_counter(), 0.0, False
        try:
            for number in range(self._squeeze.cycles):
                if number and seconds > self._squeeze.seconds:
                    break
                self._cycle()
                seconds = time.perf_counter() - started
                advance(1)
        except KeyboardInterrupt:
            if not self._ended.returns:
                raise
            interrupted = True
            self._drop_all()
        equal = None if self._wrong.broken else before == self._score(probe)
        figures = {"seconds": seconds, "interrupted": interrupted}
        return figures | self._summary(equal)

    def _drop_all(self) -> None:
        """Drop the requests of a cycle that does not go on, and look at what that has left.

        The interrupt may have come in the middle of a step: figures outlive books that it broke.
        """
        for name in list(self._engine._sequences):
            self._engine.abort(name)
        try:
            self._rest()
        except AssertionError as error:
            self._wrong.broken = str(error)

    def _watch_releases(self) -> None:
        """Time what gives planes up, and the narrower LUTs that are written before the next step.

        The caller of a release takes the pages in the same step, or preempts.
        """
        precision, table = (
            cast("Any", part) for part in (self._engine._parts.precision, self._table)
        )
        release, publish = precision.release, table.publish

        def timed_release(*arguments: Any, **options: Any) -> int:
            started = time.perf_counter()
            pages: int = release(*arguments, **options)
            if pages > 0:
                self._cycle_record.releases.append((time.perf_counter() - started) * 1e3)
                self._cycle_record.released_pages += pages
            return pages

        def timed_publish() -> None:
            narrowed, started = bool(table._narrowed), time.perf_counter()
            publish()
            if narrowed:
                self._cycle_record.writes.append((time.perf_counter() - started) * 1e3)

        precision.release, table.publish = timed_release, timed_publish

    @property
    def _table(self) -> WeightPageTable:
        table = self._engine._parts.table
        assert table is not None  # the policy is adaptive
        return table

    # -- the parts of a cycle ----------------------------------------------------------------

    def _cycle(self) -> None:
        squeeze, engine = self._squeeze, self._engine
        most = engine.max_model_len - PROBE
        probes = [self._add(self._prompt(PROBE), most) for _ in range(squeeze.probes)]
        for _ in range(squeeze.steady_steps):
            self._step()
        long = {self._add(self._prompt(length), squeeze.output_len) for length in self._long}
        while long:
            long -= self._step()
        for _ in range(squeeze.ease_steps):
            self._step()
        for name in probes:
            engine.abort(name)
        self._cycle_record.returns.append(self._rest())
        self._ended.add(self._cycle_record)
        self._cycle_record, self._status_then = _Record(), engine.status()

    def _rest(self) -> float:
        """Nothing runs: wait for the planes and hold the books against the start's.

        Returns:
            Seconds until all planes were back.

        Raises:
            AssertionError: An invariant of the engine does not hold.
        """
        engine, start, wrong = self._engine, self._start, self._wrong
        engine.check_integrity()
        seconds = self._settle()
        now = engine.status()
        wrong.leaked += start.pages_free - now.pages_free + now.pages_kv
        wrong.not_returned += now.mean_bits != start.mean_bits
        return seconds

    def _step(self) -> set[str]:
        """One step, timed; requests that ended in it."""
        engine, record = self._engine, self._cycle_record
        before = engine.status()
        started = time.perf_counter()
        outputs = engine.step()
        elapsed = (time.perf_counter() - started) * 1e3
        after = engine.status()
        for output in outputs:
            if output.error is not None:
                raise PwError(f"a request of the squeeze failed: {output.error}")
        tokens = after.step_tokens - before.step_tokens
        if len(outputs) == tokens == self._squeeze.probes == before.running:
            moved = after.transitions != before.transitions or after.moves_in_flight > 0
            (record.moving_ms if moved else record.quiet_ms).append(elapsed)
        record.lowest_bits = min(record.lowest_bits, after.mean_bits)
        record.most_kv = max(record.most_kv, after.pages_kv)
        over = max(after.bytes_over_budget, after.bytes.total - after.bytes.budget)
        self._wrong.over_budget = max(self._wrong.over_budget, over)
        return {output.request_id for output in outputs if output.finish_reason is not None}

    def _settle(self) -> float:
        """Idle until planes have come back; seconds it took."""
        started = last = time.perf_counter()
        bits = self._engine.status().mean_bits
        while time.perf_counter() - started < self._squeeze.return_seconds:
            pending = self._engine.idle_turn()
            now = self._engine.status().mean_bits
            if now != bits:
                bits, last = now, time.perf_counter()
            if not pending:
                break
            time.sleep(_IDLE_SECONDS)
        return last - started

    # -- requests ------------------------------------------------------------------------------

    def _add(self, prompt: list[int], tokens: int) -> str:
        self._cycle_record.requests += 1
        name = f"squeeze-{next(self._names)}"
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        self._engine.add_request(name, prompt, params)
        return name

    def _prompt(self, length: int) -> list[int]:
        vocabulary = self._engine.tokenizer.vocab_size
        return self._rng.integers(vocabulary, size=length).tolist()  # type: ignore[no-any-return]

    def _score(self, prompt: list[int]) -> object:
        """Tokens and log-probabilities of a short answer, from a fresh start."""
        params = SamplingParams(
            temperature=0.0, max_tokens=8, ignore_eos=True, prompt_logprobs=0, logprobs=1
        )
        answer = self._engine.generate([prompt], params)
        self._settle()
        return answer

    # -- the end -------------------------------------------------------------------------------

    def _summary(self, equal: bool | None) -> dict[str, Any]:
        ended, wrong, status = self._ended, self._wrong, self._status_then
        return {
            "cycles": len(ended.returns),
            "requests": ended.requests,
            "long_prompts": self._long,
            "bytes_over_budget": wrong.over_budget,
            "pages_leaked": wrong.leaked,
            "cycles_without_return": wrong.not_returned,
            "broken_by_interrupt": wrong.broken,
            "equal_before_and_after": equal,
            "most_bits": self._start.mean_bits,
            "lowest_bits": ended.lowest_bits,
            "kv_bytes_at_most": ended.most_kv * status.page_bytes,
            "preemptions": status.preemptions - self._start.preemptions,
            "transfer_failures": self._engine.status().transfer_failures,
            **_moved(self._start, status),
            "releases": len(ended.releases),
            "released_pages": ended.released_pages,
            **_distribution("release", ended.releases),
            **_distribution("release_write", ended.writes),
            "raise_to_commit_mean_ms": _per_move(self._start, status),
            "return_seconds_median": float(np.median(ended.returns)),
            "return_seconds_most": max(ended.returns),
            **_steps("quiet", ended.quiet_ms),
            **_steps("moving", ended.moving_ms),
            "bytes": status.bytes,
            "bytes_total": status.bytes.total,
        }


def _moved(start: EngineStatus, now: EngineStatus) -> dict[str, Any]:
    names = ("transitions", "plans", "bytes_released", "bytes_reloaded", "plan_seconds_total")
    return {name: getattr(now, name) - getattr(start, name) for name in names}


def _steps(name: str, milliseconds: list[float]) -> dict[str, Any]:
    return {f"{name}_steps": len(milliseconds), **_distribution(f"{name}_step", milliseconds)}


def _distribution(name: str, milliseconds: list[float]) -> dict[str, Any]:
    return {
        f"{name}_p{percentile}_ms": float(np.percentile(milliseconds, percentile))
        for percentile in ((50, 99) if milliseconds else ())
    }


def _per_move(start: EngineStatus, now: EngineStatus) -> float:
    """Mean milliseconds from the start of a raise to its commit."""
    seconds = now.move_seconds_total - start.move_seconds_total
    return seconds * 1e3 / max(1, now.moves - start.moves)
