"""Turns of an engine's loop: the step, what it makes, what it breaks. Its caller does the waiting.

A step that raises costs the sequences that took part in it, not the engine; only a fault that comes
back at once, again and again, ends it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pw.engine.request import RequestOutput, SamplingParams
from pw.errors import EngineLostError

if TYPE_CHECKING:
    from pw.engine.engine import Engine

logger = logging.getLogger(__name__)

FAILURES_IN_A_ROW = 3  # the last of so many steps that raise ends the engine
IDLE_SECONDS = 0.2  # between turns of an engine that has nothing to do
_PENDING_SECONDS = 0.02  # between safe points while planes come back to an idle engine


class EngineLoop:
    """Runs an engine turn by turn, in one thread.

    Args:
        engine: Touched by this thread only.
        deliver: Gets the outputs of a turn, all at once.
        queue_timeout: Seconds after which a request that has not begun is given up; None: never.
    """

    def __init__(
        self,
        engine: Engine,
        deliver: Callable[[list[RequestOutput]], None],
        queue_timeout: float | None = None,
    ) -> None:
        self.engine = engine
        self._deliver = deliver
        self._queue_timeout = queue_timeout
        self._deadlines: dict[str, float] = {}  # of requests that may wait, oldest first
        self._failures = 0  # steps in a row that raised

    def add(self, request_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        """Queue a request.

        Raises:
            RequestError: The engine refuses it.
        """
        self.engine.add_request(request_id, prompt, params)
        if self._queue_timeout is not None:
            self._deadlines[request_id] = time.monotonic() + self._queue_timeout

    def abort(self, request_id: str) -> None:
        """Give a request up; its last output is delivered. Unknown ids are ignored."""
        output = self.engine.abort(request_id)
        self._deadlines.pop(request_id, None)
        if output is not None:
            self._deliver([output])

    def turn(self) -> float:
        """Make one step, or one turn of an engine without requests.

        Returns:
            Seconds until the next turn is due, unless a request comes before; 0 = at once.

        Raises:
            Exception: The engine is beyond help.
        """
        self._give_up_late()
        try:
            if not self.engine.has_work():
                wait = _PENDING_SECONDS if self.engine.idle_turn() else IDLE_SECONDS
                outputs = []
            else:
                wait, outputs = 0.0, self.engine.step()
                self._failures = 0  # an idle turn proves nothing
        except EngineLostError:
            raise
        except Exception as error:
            wait, outputs = 0.0, self._contain(error)
        if outputs:
            self._deliver(outputs)
        return wait

    def _contain(self, error: Exception) -> list[RequestOutput]:
        """End what took part in a step that raised; raises again what does not stop."""
        self._failures += 1
        if self._failures >= FAILURES_IN_A_ROW:
            raise error
        logger.error("a step failed, its sequences end here", exc_info=error)
        return self.engine.fail_running("the engine failed at a step", "engine_failed")

    def _give_up_late(self) -> None:
        """End requests that have waited for too long. All may wait as long: the oldest is next."""
        now = time.monotonic()
        while self._deadlines:
            request_id, deadline = next(iter(self._deadlines.items()))
            if now < deadline:
                return
            del self._deadlines[request_id]
            if self.engine.waits(request_id) and (output := self.engine.abort(request_id)):
                error = f"the request waited for {self._queue_timeout:g} s and had not begun"
                late = replace(output, finish_reason="error", error=error, error_code="timeout")
                self._deliver([late])
