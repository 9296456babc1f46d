"""What the server says about itself over time: samples of `/v1/pw/status` and their arithmetic."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import httpx

QUIET = "quiet"  # mark of a time without load
PlanKind = Literal["release", "reload", "trade"]

_RELOADS, _TRADES = ("headroom", "idle"), ("rebalance",)  # every other reason releases


@dataclass(frozen=True)
class PlanEvent:
    """One plan of the engine, at the sample that was the first to show it."""

    seconds: float
    kind: PlanKind
    moves: int
    pages: int


@dataclass(frozen=True)
class Sample:
    """The engine at one moment. Fields as in the status; only `seconds` is ours."""

    seconds: float  # since the timeline began
    step: int
    running: int
    waiting: int
    finished: int
    failed: int
    preemptions: int
    pages_weights: int
    pages_kv: int
    pages_free: int
    pages_total: int
    page_bytes: int
    mean_bits: float
    layer_bits: Mapping[str, float]
    moves_in_flight: int
    plans: int
    bytes_released: int
    bytes_reloaded: int
    bytes_over_budget: int
    plan_history: tuple[Mapping[str, Any], ...] = field(repr=False, default=())

    @classmethod
    def of_status(cls, status: Mapping[str, Any], seconds: float) -> Sample:
        """From the JSON of `/v1/pw/status`."""
        named = {name: status[name] for name in cls.__dataclass_fields__ if name != "seconds"}
        return cls(seconds=seconds, **named)

    @property
    def quiet(self) -> bool:
        """Nothing runs, waits or moves: the books hold still and can be compared page by page."""
        return self.running == self.waiting == self.moves_in_flight == 0

    @property
    def pages_lost(self) -> int:
        """Pages that are neither free nor anybody's. Exact when quiet."""
        return self.pages_total - self.pages_weights - self.pages_kv - self.pages_free


class Timeline:
    """Samples in order, the plans between them, and when each part of the load began."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.plans: list[PlanEvent] = []
        self.marks: list[tuple[float, str]] = []

    def add(self, sample: Sample) -> None:
        """Append a sample; plans that the one before did not show become events."""
        known = self.samples[-1].plans if self.samples else sample.plans
        fresh = min(sample.plans - known, len(sample.plan_history))
        self.samples.append(sample)
        for record in sample.plan_history[len(sample.plan_history) - fresh :]:
            kind = kind_of(str(record["reason"]))
            self.plans.append(
                PlanEvent(sample.seconds, kind, int(record["moves"]), int(record["pages"]))
            )

    def mark(self, name: str) -> None:
        """Something begins now."""
        self.marks.append((self.samples[-1].seconds if self.samples else 0.0, name))

    @property
    def first(self) -> Sample:
        """The first sample."""
        return self.samples[0]

    @property
    def last(self) -> Sample:
        """The newest sample."""
        return self.samples[-1]

    @property
    def finished(self) -> int:
        """Requests finished since the first sample."""
        return self.last.finished - self.first.finished

    def least_bits(self) -> float:
        """Fewest mean bits of any sample."""
        return min(sample.mean_bits for sample in self.samples)

    def most_kv_pages(self) -> int:
        """Most KV pages of any sample."""
        return max(sample.pages_kv for sample in self.samples)

    def pages_lost(self) -> int:
        """Worst of the moments at which the books held still; one counted twice is as bad.

        The server answers while its engine runs, so a single sample may have caught a page
        between two owners: only a sample that repeats the one before it counts.
        """
        still = [
            sample
            for before, sample in zip(self.samples, self.samples[1:], strict=False)
            if before.quiet and replace(before, seconds=sample.seconds) == sample
        ]
        return max((abs(sample.pages_lost) for sample in still), default=0)

    def time_by_bits(self) -> dict[int, float]:
        """Share of the time by whole mean bits, rounded; a sample counts until the next one."""
        seconds: dict[int, float] = {}
        for sample, after in zip(self.samples, self.samples[1:], strict=False):
            width = round(sample.mean_bits)
            seconds[width] = seconds.get(width, 0.0) + after.seconds - sample.seconds
        total = sum(seconds.values())
        return {width: seconds[width] / total for width in sorted(seconds)} if total else {}


def kind_of(reason: str) -> PlanKind:
    """What a plan of this reason does."""
    return "reload" if reason in _RELOADS else "trade" if reason in _TRADES else "release"


class Observer:
    """Fills a timeline from a server.

    Args:
        client: Knows the server.
        show: Called with the timeline after each sample.
        every: Seconds between two samples.
    """

    def __init__(
        self, client: httpx.AsyncClient, show: Callable[[Timeline], None], every: float
    ) -> None:
        self._client, self._show, self._every = client, show, every
        self._started = time.monotonic()
        self.timeline = Timeline()

    async def sample(self) -> Sample:
        """Ask once.

        Raises:
            httpx.HTTPError: The server does not answer.
        """
        reply = await self._client.get("/v1/pw/status")
        reply.raise_for_status()
        self.timeline.add(Sample.of_status(reply.json(), time.monotonic() - self._started))
        self._show(self.timeline)
        return self.timeline.last

    async def follow(self) -> None:
        """Sample until cancelled."""
        while True:
            await self.sample()
            await asyncio.sleep(self._every)

    async def settle(self, bits: float, timeout: float) -> bool:
        """Wait, while another task follows, until nothing runs and mean bits are back.

        Returns:
            False when that did not happen within so many seconds.
        """
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            await asyncio.sleep(self._every)
            if self.timeline.last.quiet and self.timeline.last.mean_bits >= bits:
                return True
        return False
