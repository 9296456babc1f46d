"""A run in which contexts grow and shrink, in pages and steps: who has how many bits when.

No model runs here. Requests arrive, hold KV pages that grow with every token, and leave; weights
have what is left of one arena. The adaptive policy is the product's own: pressure policy, planner,
reloads. A step makes one token for every running request, or prefills one prompt.

Axes: n blocks, W widths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from pw.config import PlannerConfig
from pw.evaluation.lab.costs import Costs
from pw.evaluation.lab.model import Bits
from pw.planning.planner import PlannerState, plan, plan_reload
from pw.planning.pressure import PressurePolicy

_STEP_SECONDS = 0.01  # what a step takes, for the transfer budget


@dataclass(frozen=True)
class Request:
    """One request of the load."""

    arrives: int  # step
    prompt: int  # tokens
    output: int  # tokens


@dataclass(eq=False)
class _Running:
    request: Request
    tokens: int  # in the KV cache
    made: int


class Weights(Protocol):
    """Who holds how many bits: a policy."""

    bits: Bits  # [n]

    def pages(self) -> int:
        """Pages of the weights now."""

    def release(self, pages: int) -> int:
        """Give up at least so many pages if possible; pages given up."""

    def safe_point(self, step: int, free: int, forecast: int) -> None:
        """Move between two steps, with so many free pages and so many expected to be needed."""


@dataclass
class Outcome:
    """What a run was."""

    steps: int = 0
    prefilled: int = 0  # tokens of prompts, first time
    recomputed: int = 0  # tokens prefilled again after a preemption
    made: int = 0  # tokens
    preemptions: int = 0
    most_kv: int = 0  # pages
    delays: list[int] = field(default_factory=list)  # steps of each request, arrival to last token
    running: list[int] = field(default_factory=list)  # requests, per step
    timeline: list[tuple[int, Bits]] = field(default_factory=list)  # tokens of a step, widths

    def allocations(self, count: int) -> list[Bits]:
        """Widths in force at the middle of each of `count` equal parts of the tokens made."""
        ends = np.cumsum([tokens for tokens, _ in self.timeline])
        middles = (np.arange(count) + 0.5) / count * ends[-1]
        return [self.timeline[int(place)][1] for place in np.searchsorted(ends, middles)]


class Arena:
    """A load served from one arena.

    Args:
        pages: Of the whole arena.
        kv_pages: Pages of a sequence of so many tokens.
        weights: The policy.
        most_running: Requests at a time at most.
        forecast_steps: Steps ahead whose KV pages count as needed.
    """

    def __init__(
        self,
        pages: int,
        kv_pages: Callable[[int], int],
        weights: Weights,
        most_running: int,
        forecast_steps: int,
    ) -> None:
        self._pages, self._kv_pages, self._weights = pages, kv_pages, weights
        self._most, self._ahead = most_running, forecast_steps
        self._running: list[_Running] = []
        self._waiting: list[_Running] = []
        self.outcome = Outcome()

    def serve(self, load: Sequence[Request]) -> Outcome:
        """Run until the last request has left."""
        coming = sorted(load, key=lambda request: request.arrives)
        outcome = self.outcome
        while coming or self._waiting or self._running:
            while coming and coming[0].arrives <= outcome.steps:
                request = coming.pop(0)
                self._waiting.append(_Running(request, 0, 0))
            self._weights.safe_point(outcome.steps, self._free(), self._forecast())
            if not self._admit():
                self._decode()
            outcome.steps += 1
            outcome.running.append(len(self._running))
        return outcome

    def _used(self) -> int:
        return sum(self._kv_pages(sequence.tokens) for sequence in self._running)

    def _free(self) -> int:
        return self._pages - self._weights.pages() - self._used()

    def _forecast(self) -> int:
        """KV pages that running requests and the next one will need beyond what they own."""
        growth = 0
        for seq in self._running:
            later = min(seq.tokens + self._ahead, seq.request.prompt + seq.request.output)
            growth += self._kv_pages(later) - self._kv_pages(seq.tokens)
        if self._waiting and len(self._running) < self._most:
            growth += self._kv_pages(self._waiting[0].request.prompt + self._waiting[0].made)
        return growth

    def _admit(self) -> bool:
        """Prefill the first waiting request if there is room for it."""
        if not self._waiting or len(self._running) >= self._most:
            return False
        first = self._waiting[0]
        length = first.request.prompt + first.made
        missing = self._kv_pages(length + 1) - self._free()
        if missing > 0 and self._weights.release(missing) < missing:
            if not self._running:
                raise ValueError(f"the arena does not hold a request of {length} tokens")
            return False
        self._running.append(self._waiting.pop(0))
        first.tokens = length
        fresh = first.made == 0
        self.outcome.prefilled += length if fresh else 0
        self.outcome.recomputed += 0 if fresh else length
        return True

    def _decode(self) -> None:
        """One token for each running request; the youngest make room where there is none."""
        while self._running:
            grown = sum(self._kv_pages(seq.tokens + 1) for seq in self._running)
            missing = grown - self._used() - self._free()
            if missing <= 0 or self._weights.release(missing) >= missing:
                break
            if len(self._running) == 1:
                raise ValueError("the arena does not hold one request")
            youngest = self._running.pop()
            youngest.tokens = 0
            self._waiting.insert(0, youngest)
            self.outcome.preemptions += 1
        for seq in self._running:
            seq.tokens += 1
            seq.made += 1
        self.outcome.made += len(self._running)
        self.outcome.most_kv = max(self.outcome.most_kv, self._used())
        if self._running:
            self.outcome.timeline.append((len(self._running), self._weights.bits))
        done = [seq for seq in self._running if seq.made >= seq.request.output]
        self.outcome.delays += [self.outcome.steps - seq.request.arrives for seq in done]
        self._running = [seq for seq in self._running if seq not in done]


class FixedWeights:
    """Weights that never move: dense, or any static allocation."""

    def __init__(self, bits: Bits, pages: int) -> None:
        self.bits, self._pages = bits, pages

    def pages(self) -> int:
        """See `Weights`."""
        return self._pages

    def release(self, pages: int) -> int:
        """Nothing to give."""
        return 0

    def safe_point(self, step: int, free: int, forecast: int) -> None:
        """Nothing to do."""


class MovingWeights:
    """The product's pressure policy over a planner, or over uniform steps.

    Args:
        state: All blocks at their widest, with damages.
        page_bytes: Of the arena.
        total_pages: Of the arena.
        config: Watermarks, dwell, transfer budget.
        uniform: All blocks have one width and change it together.

    Attributes:
        moved_bytes: Copied from the host by raises.
        reductions: Changes downward of a block.
    """

    def __init__(
        self,
        state: PlannerState,
        page_bytes: int,
        total_pages: int,
        config: PlannerConfig,
        *,
        uniform: bool = False,
    ) -> None:
        self._state, self._page, self._total = state, page_bytes, total_pages
        self._config, self._uniform = config, uniform
        self._policy = PressurePolicy(config, page_bytes)
        self.bits: Bits = state.ceil.copy()
        self.moved_bytes = self.reductions = 0

    @property
    def flaps(self) -> int:
        """Reloads that were taken back soon after."""
        return self._policy.flaps

    def pages(self) -> int:
        """See `Weights`."""
        return self._bytes(self.bits) // self._page

    def release(self, pages: int) -> int:
        """Reduce until at least `pages` are free, or nothing is left to reduce."""
        before = self.pages()
        target = (before - pages) * self._page
        if self._uniform:
            fitting = [w for w in self._state.widths if self._bytes_at(w) <= target]
            lower = self._width(fitting[-1] if fitting else self._state.widths[0])
        else:
            lower = plan(self._now(), pages * self._page, method=self._config.planner).apply(
                self.bits
            )
        self._set(np.minimum(self.bits, lower))
        return before - self.pages()

    def safe_point(self, step: int, free: int, forecast: int) -> None:
        """See `Weights`."""
        below = int((self._state.ceil - self.bits).sum())
        decision = self._policy.decide(
            now_step=step,
            now_seconds=step * _STEP_SECONDS,
            pages_free=free,
            pages_total=self._total,
            forecast_pages=forecast,
            bits_below_max=below,
            moving=False,
        )
        if decision.release_pages:
            self.release(decision.release_pages)
        elif decision.reload_pages and not self._reload(decision.reload_pages):
            self._policy.reload_refused(step, decision)

    def _reload(self, pages: int) -> bool:
        if self._uniform:
            room = self._bytes(self.bits) + pages * self._page
            fitting = [w for w in self._state.widths if self._bytes_at(w) <= room]
            raised = np.maximum(self.bits, self._width(fitting[-1]))
        else:
            raised = plan_reload(self._now(), pages * self._page).apply(self.bits)
        if (raised == self.bits).all():
            return False
        self.moved_bytes += self._bytes(raised) - self._bytes(self.bits)
        self.bits = raised
        return True

    def _set(self, lower: Bits) -> None:
        self.reductions += int((lower < self.bits).sum())
        self.bits = lower

    def _now(self) -> PlannerState:
        return replace(self._state, bits=self.bits)

    def _width(self, width: int) -> Bits:
        return np.full_like(self.bits, width)

    def _bytes(self, bits: Bits) -> int:
        costs: Costs = self._state.cost_bytes
        return int(costs[np.arange(len(bits)), bits - self._state.widths[0]].sum())

    def _bytes_at(self, width: int) -> int:
        return self._bytes(self._width(width))
