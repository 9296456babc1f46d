"""An engine in a thread of its own, seen from asyncio."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable

from pw.engine.engine import Engine
from pw.engine.request import EngineStatus, RequestOutput, SamplingParams
from pw.errors import PwError, RequestError

logger = logging.getLogger(__name__)

_STALL_SECONDS = 60.0  # no step for so long with work pending: not healthy
_IDLE_SECONDS = 0.02  # between safe points while planes come back to an idle engine

Outlet = Callable[[RequestOutput | BaseException], None]


class AsyncEngine:
    """Requests in, streams of outputs out. The engine is touched by its thread only.

    Args:
        engine: Owned from here on.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._outlets: dict[str, Outlet] = {}
        self._wake = threading.Event()
        self._stopping = False
        self._draining = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="pw-engine", daemon=True)

    def start(self) -> None:
        """Start stepping."""
        self._thread.start()

    async def generate(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of a request as they come; the last has `finish_reason` set.

        Closing the iterator aborts the request.

        Raises:
            RequestError: The request is refused, or the engine is dead or draining.
        """
        if self._draining or self._failure is not None:
            raise RequestError(
                "the engine takes no more requests", code="engine_unavailable", status=503
            )
        loop = asyncio.get_running_loop()
        stream: asyncio.Queue[RequestOutput | BaseException] = asyncio.Queue()

        def outlet(item: RequestOutput | BaseException) -> None:
            loop.call_soon_threadsafe(stream.put_nowait, item)

        self._send(lambda: self._add(request_id, prompt_token_ids, params, outlet))
        finished = False
        try:
            while not finished:
                item = await stream.get()
                if isinstance(item, BaseException):
                    finished = True
                    raise item
                finished = item.finish_reason is not None
                yield item
        finally:
            if not finished:
                self.abort(request_id)

    def abort(self, request_id: str) -> None:
        """Give a request up within one step. Unknown and finished ids are ignored."""
        self._send(lambda: self._abort(request_id))

    def status(self) -> EngineStatus:
        """A snapshot of the engine."""
        return self.engine.status()

    def healthy(self) -> bool:
        """Whether the thread lives and makes progress when it has work."""
        if self._failure is not None or not self._thread.is_alive():
            return False
        stalled = time.monotonic() - self.engine.status().last_step_time > _STALL_SECONDS
        return not (stalled and self.engine.has_work())

    async def shutdown(self, drain_seconds: float) -> None:
        """Take no more requests, finish what runs for at most so long, then stop."""
        self._draining = True
        deadline = time.monotonic() + drain_seconds
        while self._outlets and time.monotonic() < deadline and self._thread.is_alive():
            await asyncio.sleep(0.02)
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)
        self.engine.close()

    # -- in the engine's thread --------------------------------------------------------------

    def _send(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        self._wake.set()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._wake.clear()
                self._obey()
                if self.engine.has_work():
                    for output in self.engine.step():
                        self._deliver(output)
                elif not self.engine.idle_turn():
                    self._wake.wait(_IDLE_SECONDS * 10)
                else:
                    self._wake.wait(_IDLE_SECONDS)
        except BaseException as error:
            logger.exception("the engine stopped at a fault of its own")
            self._failure = error
        finally:
            self._end_all()

    def _obey(self) -> None:
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            command()

    def _add(
        self, request_id: str, prompt: list[int], params: SamplingParams, outlet: Outlet
    ) -> None:
        try:
            self.engine.add_request(request_id, prompt, params)
        except (PwError, ValueError) as error:
            outlet(error)
        else:
            self._outlets[request_id] = outlet

    def _abort(self, request_id: str) -> None:
        output = self.engine.abort(request_id)
        if output is not None:
            self._deliver(output)

    def _deliver(self, output: RequestOutput) -> None:
        outlet = self._outlets.get(output.request_id)
        if output.finish_reason is not None:
            self._outlets.pop(output.request_id, None)
        if outlet is not None:
            try:
                outlet(output)
            except RuntimeError:  # the event loop of this request is closed
                self._outlets.pop(output.request_id, None)

    def _end_all(self) -> None:
        """Nobody may wait for ever: streams that are still open end with an error."""
        self._draining = True
        self._obey()
        for request_id, outlet in list(self._outlets.items()):
            reason = "the engine stopped" if self._failure is None else "the engine failed"
            try:
                outlet(RequestOutput(request_id, finish_reason="error", error=reason))
            except RuntimeError:
                continue
        self._outlets.clear()
