"""When weights give pages to the KV cache and when they take them back: a pure state machine.

Decides amounts only; `pw.planning.planner` says which blocks. Reads no clock: steps and seconds
come as arguments, so a recorded run decides the same again.

Release (the paper's Eq. 7 with a forecast, in pages instead of KV blocks):

    projected = free - forecast
    release   = max(0, T + 1 - projected),            T = low watermark

Eq. 7 alone is memoryless, so a load that swings around T makes bits flap (ALGORITHMS pitfall 25).
Hence reloads

- start only above the higher watermark, and stop there: a reload that is carried out in full never
  causes a release by itself. An idle engine has no demand to keep pages for and fills to T + 1.
  Neither has a load that is settled: pages that stayed free at every step of at least
  `settle_steps` (more after flaps) are not needed, so planes take them back;
- wait `dwell_steps` after a release. A release within 8 such times of a reload is a flap: that
  reload was not worth its copy. Each flap doubles the wait, up to those 8 times, and 32 of them
  without a flap reset it;
- wait `idle_grace_seconds` once the engine is idle: between two requests of one conversation planes
  would only come back to be given up again;
- spend a token bucket that holds one second of `transfer_budget_bytes`, all of it at a time while
  more is wanted: a plan takes the host longer than a decode step, so few steps may have one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pw.config import PlannerConfig

LONGEST_DWELL = 8  # in units of dwell_steps
HELD_UP = ("grace", "moving", "dwell", "transfer_budget")  # reasons that time alone removes


@dataclass(frozen=True, slots=True)
class Decision:
    """Pages to move now; at most one of the two is not 0. `reason` goes into the trace."""

    release_pages: int = 0
    reload_pages: int = 0
    reason: str = "steady"


class PressurePolicy:
    """Watermarks, dwell and transfer budget of one arena.

    Args:
        config: The dials.
        page_bytes: Size of an arena page.

    Attributes:
        releases: Release decisions so far.
        reloads: Reload decisions so far.
        flaps: Releases that came within the longest dwell after a reload.
    """

    def __init__(self, config: PlannerConfig, page_bytes: int) -> None:
        self.config, self.page_bytes = config, page_bytes
        self.releases = self.reloads = self.flaps = 0
        self._dwell = config.dwell_steps
        self._reload_from = 0  # first step at which a reload may be decided
        self._last_reload: int | None = None  # none since the last release
        self._last_release: int | None = None
        self._last_flap: int | None = None
        self._capacity = float(max(config.transfer_budget_bytes, page_bytes))
        self._tokens = self._capacity  # bytes
        self._seconds: float | None = None
        self._idle_since: float | None = None
        self._settling = _Settling()

    def decide(
        self,
        *,
        now_step: int,
        now_seconds: float,
        pages_free: int,
        pages_total: int,
        forecast_pages: int,
        bits_below_max: int,
        moving: bool,
        idle: bool = False,
    ) -> Decision:
        """Say what to do at this safe point.

        Args:
            now_step: Turns of the engine loop, idle turns included.
            now_seconds: Monotonic time; only differences count.
            pages_free: Pages that nobody owns.
            pages_total: Pages of the arena.
            forecast_pages: KV pages that running and waiting requests will need beyond those they
                own, within `forecast_steps`.
            bits_below_max: Sum over blocks of ceiling - committed bits.
            moving: A reload is in flight.
            idle: No request runs or waits.
        """
        self._refill(now_seconds)
        in_grace = self._in_grace(now_seconds, idle)
        low = math.ceil(self.config.low_watermark * pages_total)
        high = max(math.ceil(self.config.high_watermark * pages_total), low + 1)
        projected = pages_free - forecast_pages
        if projected <= low and not idle:
            self.note_release(now_step)
            reason = "kv_pressure" if pages_free <= low else "kv_forecast"
            return Decision(release_pages=low + 1 - projected, reason=reason)
        if bits_below_max <= 0:
            return Decision(reason="at_max")
        reason, wanted = self._wanted(projected, low, high, idle)
        if wanted <= 0:
            return Decision(reason="steady")
        if in_grace:
            return Decision(reason="grace")
        if moving:
            return Decision(reason="moving")
        if now_step < self._reload_from:
            return Decision(reason="dwell")
        return self._reload(now_step, wanted, reason)

    def _wanted(self, projected: int, low: int, high: int, idle: bool) -> tuple[str, int]:
        """Pages that planes may take back, and why."""
        if idle:
            return "idle", projected - (low + 1)
        flapping = self._dwell / max(1, self.config.dwell_steps)
        least = self._settling.least(projected, self.config.settle_steps * flapping)
        if least - (low + 1) > projected - high:
            return "settled", int(least) - (low + 1)
        return "headroom", projected - high

    def note_release(self, now_step: int) -> None:
        """Count a release, also one that the engine made itself after a failed allocation. Calls
        for one step count once.
        """
        if now_step == self._last_release:
            return
        self.releases += 1
        longest = LONGEST_DWELL * self.config.dwell_steps
        if self._last_reload is not None and now_step - self._last_reload <= longest:
            self.flaps += 1
            self._dwell = min(2 * self._dwell, longest)
            self._last_flap = now_step
        elif self._last_flap is not None and now_step - self._last_flap > 4 * longest:
            self._dwell, self._last_flap = self.config.dwell_steps, None
        self._last_release, self._last_reload = now_step, None
        self._settling = _Settling()
        self._reload_from = now_step + self._dwell

    def reload_refused(self, now_step: int, decision: Decision) -> None:
        """Take back a reload for which the planner found no move: no block's next plane fits."""
        self.reloads -= 1
        self._tokens += decision.reload_pages * self.page_bytes
        self._settling.taken(-decision.reload_pages)
        self._reload_from = now_step + self._dwell

    def _in_grace(self, now_seconds: float, idle: bool) -> bool:
        """Whether the engine has just become idle: the next request may be a moment away."""
        if not idle:
            self._idle_since = None
            return False
        if self._idle_since is None:
            self._idle_since = now_seconds
        return now_seconds - self._idle_since < self.config.idle_grace_seconds

    def _refill(self, now_seconds: float) -> None:
        elapsed = 0.0 if self._seconds is None else max(0.0, now_seconds - self._seconds)
        self._seconds = now_seconds
        earned = elapsed * self.config.transfer_budget_bytes
        self._tokens = min(self._capacity, self._tokens + earned)

    def _reload(self, now_step: int, wanted: int, reason: str) -> Decision:
        affordable = int(self._tokens // self.page_bytes)
        chunk = max(1, int(self._capacity // self.page_bytes))
        if affordable < min(wanted, chunk):
            return Decision(reason="transfer_budget")
        pages = min(wanted, affordable)
        self._tokens -= pages * self.page_bytes
        self._last_reload = now_step
        self.reloads += 1
        self._settling.taken(pages)
        return Decision(reload_pages=pages, reason=reason)


class _Settling:
    """The fewest pages that were left in the last one to two spans of steps; none are sure (-inf)
    before the first span is over.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._before, self._now = -math.inf, math.inf

    def least(self, pages: int, span: float) -> float:
        """Take in the pages left at a step; a span of 0 steps is never over."""
        if self._steps >= span > 0:
            self._steps, self._before, self._now = 0, self._now, math.inf
        self._steps += 1
        self._now = min(self._now, pages)
        return min(self._before, self._now)

    def taken(self, pages: int) -> None:
        """Count pages that planes take from now on."""
        self._before -= pages
        self._now -= pages
