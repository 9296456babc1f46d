"""Looks at the engine once a second, for all that must have looked before it is asked."""

from __future__ import annotations

import asyncio
import contextlib
import time

from pw.serving.operations.health import STALL_SECONDS, Progress
from pw.serving.operations.log_lines import StatsLine
from pw.serving.operations.timeline import INTERVAL_SECONDS, Timeline
from pw.serving.process.engine_protocol import AsyncEngineProtocol


class Watch:
    """The timeline, the forward-progress check and the stats line of one server.

    Args:
        engine: Looked at; its status is cheap and never raises.
        stall_seconds: See `Progress`.
    """

    def __init__(self, engine: AsyncEngineProtocol, stall_seconds: float = STALL_SECONDS) -> None:
        self._engine = engine
        self._task: asyncio.Task[None] | None = None
        self.timeline = Timeline()
        self.progress = Progress(stall_seconds)
        self.stats = StatsLine()

    def start(self) -> None:
        """Begin to look; the event loop runs."""
        self._task = asyncio.create_task(self._run(), name="pw-watch")

    async def stop(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def look(self) -> None:
        """Take one snapshot and tell everyone who watches."""
        status, now = self._engine.status(), time.monotonic()
        self.timeline.record(status, time.time(), now)
        self.progress.observe(status, now)
        self.stats.observe(status, now)

    async def _run(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(INTERVAL_SECONDS)
