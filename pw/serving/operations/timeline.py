"""What the engine did in the last quarter of an hour, a sample a second, for people who look."""

from __future__ import annotations

import math
from array import array
from dataclasses import astuple, dataclass, field, fields
from typing import Any

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


_NUMBERS = {  # what is kept of a sample as numbers, and how they are read back
    field.name: float if field.type == "float" else int
    for field in fields(Sample)
    if field.name not in ("number", "plans")
}
_NOTHING = Planned(0, 0, 0)
_FIELDS = len(fields(Planned))


class Timeline:
    """The latest samples. Counters are differences, so they survive an engine that starts again.

    All that will be kept has its place from the start. Objects that stay for a quarter of an hour,
    made among those of requests, would each hold on to the memory around them.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._columns = {name: array("d", bytes(8 * kept)) for name in _NUMBERS}
        self._plans: dict[str, array[int]] = {}  # by trigger: as many `Planned`, flat
        self._last: tuple[EngineStatus, float] | None = None
        self._next = 0

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
            number=self._next,
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
        self._next += 1
        self._keep(sample)
        return sample

    def since(self, number: int) -> list[Sample]:
        """Samples from `number` on that are still kept, oldest first."""
        return [self._sample(each) for each in range(self._oldest(number), self._next)]

    def _oldest(self, number: int) -> int:
        return max(0, number, self._next - self._kept)

    def _keep(self, sample: Sample) -> None:
        place = sample.number % self._kept
        for name, column in self._columns.items():
            column[place] = getattr(sample, name)
        for trigger in sample.plans:  # the engine's own words, a few
            if trigger not in self._plans:
                self._plans[trigger] = array("q", bytes(8 * _FIELDS * self._kept))
        for trigger, counts in self._plans.items():
            planned = sample.plans.get(trigger, _NOTHING)
            counts[place * _FIELDS : (place + 1) * _FIELDS] = array("q", astuple(planned))

    def _sample(self, number: int) -> Sample:
        place = number % self._kept
        numbers: dict[str, Any] = {
            name: _NUMBERS[name](column[place]) for name, column in self._columns.items()
        }
        plans = {
            trigger: Planned(*column[place * _FIELDS : (place + 1) * _FIELDS])
            for trigger, column in self._plans.items()
        }
        happened = {trigger: planned for trigger, planned in plans.items() if planned.plans}
        return Sample(number=number, plans=happened, **numbers)


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
