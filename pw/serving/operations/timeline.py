"""What the engine did in the last quarter of an hour, a sample a second, for people who look."""

from __future__ import annotations

import itertools
import math
from collections import deque
from dataclasses import dataclass, field

from pw.engine.request import EngineStatus

INTERVAL_SECONDS = 1.0
KEPT = 900  # samples


@dataclass(frozen=True, slots=True)
class Planned:
    """Plans of one trigger between two samples."""

    plans: int
    moves: int  # blocks whose width changed, or began to
    pages: int  # given up or asked back


@dataclass(frozen=True, slots=True)
class Sample:
    """The engine at one moment, and what it did since the sample before."""

    number: int  # counts up from 0 for ever
    time: float  # Unix seconds
    running: int
    waiting: int
    pages_weights: int
    pages_kv: int
    pages_free: int
    mean_bits: float
    prompt_tokens_per_second: float
    generation_tokens_per_second: float
    preemptions: int  # since the sample before
    plans: dict[str, Planned] = field(default_factory=dict)  # by trigger


class Timeline:
    """The latest samples. Counters are differences, so they survive an engine that starts again."""

    def __init__(self, kept: int = KEPT) -> None:
        self._samples: deque[Sample] = deque(maxlen=kept)
        self._last: tuple[EngineStatus, float] | None = None
        self._numbers = itertools.count()

    def record(self, status: EngineStatus, unix: float, monotonic: float) -> Sample:
        """Add a sample.

        Args:
            status: Of the engine now.
            unix: Now, in Unix seconds; shown, never subtracted.
            monotonic: Now, in seconds of a clock that does not jump.
        """
        before, then = self._last or (status, -math.inf)
        seconds = monotonic - then
        sample = Sample(
            number=next(self._numbers),
            time=unix,
            running=status.running,
            waiting=status.waiting,
            pages_weights=status.pages_weights,
            pages_kv=status.pages_kv,
            pages_free=status.pages_free,
            mean_bits=status.mean_bits,
            prompt_tokens_per_second=_gain(status.prompt_tokens, before.prompt_tokens) / seconds,
            generation_tokens_per_second=(
                _gain(status.generation_tokens, before.generation_tokens) / seconds
            ),
            preemptions=_gain(status.preemptions, before.preemptions),
            plans=_planned(status, _gain(status.plans, before.plans)),
        )
        self._last = (status, monotonic)
        self._samples.append(sample)
        return sample

    def since(self, number: int) -> list[Sample]:
        """Samples from `number` on that are still kept, oldest first."""
        return [sample for sample in self._samples if sample.number >= number]


def _gain(now: int, before: int) -> int:
    return max(0, now - before)


def _planned(status: EngineStatus, plans: int) -> dict[str, Planned]:
    """The latest `plans` plans by trigger, as far as the engine's history reaches back."""
    triggers: dict[str, Planned] = {}
    for record in status.plan_history[len(status.plan_history) - plans :] if plans else ():
        trigger = str(record["reason"])
        seen = triggers.get(trigger, Planned(0, 0, 0))
        moves, pages = (_count(record, name) for name in ("moves", "pages"))
        triggers[trigger] = Planned(seen.plans + 1, seen.moves + moves, seen.pages + pages)
    return triggers


def _count(record: dict[str, object], name: str) -> int:
    value = record.get(name)
    return value if isinstance(value, int) else 0
