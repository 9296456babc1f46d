"""Whether the server can serve, and if not, why: what `/health/ready` and a supervisor ask."""

from __future__ import annotations

import logging
import time

from pw.engine.request import EngineStatus
from pw.errors import EngineLostError
from pw.serving.limits import AdmissionGate
from pw.serving.process.engine_protocol import AsyncEngineProtocol

logger = logging.getLogger("pw.serving")

STALL_SECONDS = 60.0  # a forward step of a large prompt on a small CPU takes a while


class Progress:
    """Whether the engine gets on with the sequences it has.

    A full queue is no fault: what counts is that forward steps are made. Reads the engine's step
    counter against this process's own clock, so that neither a wall clock that jumps nor the
    engine's own idea of its health matters.

    Args:
        stall_seconds: Without a step for so long, with sequences in the engine, it is stalled.
    """

    def __init__(self, stall_seconds: float = STALL_SECONDS) -> None:
        self._stall_seconds = stall_seconds
        self._step = -1
        self._since = time.monotonic()
        self.stalled = False

    def observe(self, status: EngineStatus, now: float) -> None:
        """Note a snapshot taken at `now`, in monotonic seconds."""
        idle = status.running + status.waiting == 0
        if idle or status.step != self._step:
            self._step, self._since = status.step, now
        was_stalled = self.stalled
        self.stalled = now - self._since > self._stall_seconds
        if self.stalled and not was_stalled:
            logger.error(
                "the engine is stalled: no step for %.0f s with %d running, %d waiting; step %d, "
                "pages: %d weights, %d KV, %d free, %d raises under way; latest plans %s",
                now - self._since,
                *(status.running, status.waiting, status.step),
                *(status.pages_weights, status.pages_kv, status.pages_free),
                status.moves_in_flight,
                list(status.plan_history[-3:]),
            )
        elif was_stalled and not self.stalled:
            logger.warning("the engine makes steps again")


class Health:
    """Answers of the health routes.

    Args:
        engine: Says whether it lives.
        gate: Says whether the server drains.
        progress: Says whether the engine makes steps.
    """

    def __init__(
        self, engine: AsyncEngineProtocol, gate: AdmissionGate, progress: Progress
    ) -> None:
        self._engine, self._gate, self._progress = engine, gate, progress

    def detail(self) -> str | None:
        """What ended the engine, where it can be told to anybody: a rank or a device was lost."""
        kind, _, text = (self._engine.failure or "").partition(": ")
        return text or None if kind == EngineLostError.__name__ else None

    def not_ready(self) -> str | None:
        """Why new requests should go elsewhere; None when they are taken and served."""
        if self._engine.failed:
            return "engine_failed"
        if self._gate.draining:
            return "draining"
        if not self._engine.healthy():
            return "engine_unhealthy"
        self._progress.observe(self._engine.status(), time.monotonic())
        return "engine_stalled" if self._progress.stalled else None
