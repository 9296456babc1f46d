"""Chooses and launches steps: safe point, schedule, launch. One may be on its way behind another.

While the device computes a decode step the host would only wait; so it launches the next one behind
it, with the tokens that the device has drawn. What it cannot know then is which sequences the
tokens end: those drop their part of the next step. Their pages may be given to others at once, as
what that step writes to them comes first in stream order. So do bits that change and planes that
are given up: what reads them has been launched before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from pw.config import EngineConfig
from pw.engine.computing import Flight, StepComputer
from pw.engine.precision.policies import FixedPrecision
from pw.engine.sampling.sampler import Sampler
from pw.engine.scheduler import Forecast
from pw.engine.sequence import Chunk, Sequence
from pw.engine.start.build import Parts
from pw.engine.start.ground import use_device


class Launcher:
    """Launches the steps of an engine.

    Args:
        parts: Of the engine.
        config: Its settings.
        computer: Computes the steps.
        books: Held while pages and queues change.
        give_up: Called, books held, with a sequence that will never run, and the reason.

    Attributes:
        step: Number of the forward step that is launched next.
    """

    def __init__(
        self,
        parts: Parts,
        config: EngineConfig,
        computer: StepComputer,
        books: threading.Lock,
        give_up: Callable[[Sequence, str], None],
    ) -> None:
        self._parts, self._computer, self._books = parts, computer, books
        self._give_up = give_up
        self._forecast_steps = config.planner.forecast_steps
        self._overlaps = config.async_scheduling
        self._plans = not isinstance(parts.precision, FixedPrecision)
        self.step = self._turn = 0
        self._ahead: Flight | None = None  # launched before the last one was read
        self._at_safe_point = False  # of the next step

    def next(self) -> Flight | None:
        """The step to be read next: the one on its way, or a new one; None when nothing can run."""
        use_device(self._parts.skeleton.device)  # the engine may have been built by another thread
        flight, self._ahead = self._ahead, None
        if flight is not None:
            return flight
        with self._books:
            if not self._at_safe_point:
                self.safe_point(idle=False)
                self._meet_floor()
            self._at_safe_point = False
            chunks = self._parts.scheduler.schedule()
        return self._launch(chunks)

    def go_ahead(self, flight: Flight) -> None:
        """Launch the step behind a flight, if that can be. It is the next one then."""
        with self._books:
            if not self._may_go_ahead(flight):
                return
            self.safe_point(idle=False)
            self._meet_floor()
            chunks = self._parts.scheduler.schedule_ahead(flight.chunks)
        self._ahead = self._launch(chunks or [], flight)
        self._at_safe_point = self._ahead is None

    def drop_dead(self) -> None:
        """Forget the step on its way if none of its sequences runs any more: it is not counted."""
        if self._ahead is not None and not any(chunk.lives for chunk in self._ahead.chunks):
            self._ahead = None
            self.step -= 1

    def safe_point(self, *, idle: bool) -> None:
        """Let bits change: nothing is launched meanwhile."""
        self._turn += 1
        self._at_safe_point = False
        forecast = Forecast(0, 0)  # which nobody reads where bits are fixed
        if self._plans:
            forecast = self._parts.scheduler.forecast(self._forecast_steps)
        self._parts.precision.safe_point(self.step, self._turn, forecast, idle)

    # -- inside ----------------------------------------------------------------------------

    def _launch(self, chunks: list[Chunk], after: Flight | None = None) -> Flight | None:
        """Launch a step at this safe point; None where there is none, or none behind another."""
        parts = self._parts
        if parts.table is not None:
            parts.table.publish()
        if not chunks:
            return None
        flight = self._computer.launch(chunks, parts.scheduler.precision(), after)
        if after is not None and flight.broken is not None:
            return None  # it is tried anew when the other has been read
        self.step += 1
        return flight

    def _may_go_ahead(self, flight: Flight) -> bool:
        """Whether a step can be launched behind a flight.

        All of the flight decodes in a fixed shape, and all that runs is in it; some of it goes on,
        and needs no token on the host for its next draw; nobody can be let in, who would wait.
        """
        steps, scheduler = self._parts.runner.steps, self._parts.scheduler
        if not self._overlaps or steps is None or flight.broken is not None:
            return False
        living = [chunk.sequence for chunk in flight.chunks if chunk.lives]
        going = [sequence for sequence in living if sequence.remaining > 1]
        if not going or len(living) < len(scheduler.running):
            return False
        if not flight.chunks[0].ahead:  # or all this was so for the step before
            if not all(steps.takes(chunk) for chunk in flight.chunks):
                return False
            if any(Sampler.reads_tokens(sequence) for sequence in going):
                return False
        return scheduler.next_floor() is None and not scheduler.admits()

    def _meet_floor(self) -> None:
        """Move planes until the next request has the bits it asks for; its end if it never will."""
        precision, wish = self._parts.precision, self._parts.scheduler.next_floor()
        if wish is None:
            precision.aim = 0
            return
        hopeless = precision.reach(wish.bits, wish.pages, wish.alone)
        if hopeless is not None:
            self._give_up(wish.sequence, hopeless)
