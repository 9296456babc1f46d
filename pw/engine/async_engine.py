"""An engine in a thread of its own, seen from asyncio: for programs that want it in their process.

A server has it in another process (`pw.serving.process.remote`), behind the same interface.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any

from pw.engine.engine import Engine
from pw.engine.process.loop import EngineLoop
from pw.engine.process.wire import EngineInfo
from pw.engine.request import EngineStatus, RequestOutput, SamplingParams
from pw.errors import RequestError

logger = logging.getLogger(__name__)

Outlet = Callable[[RequestOutput | BaseException], None]


class AsyncEngine:
    """Requests in, streams of outputs out. The engine is touched by its thread only.

    Args:
        engine: Owned from here on.
        stall_seconds: Without a turn of the thread for so long it is not healthy.
        queue_timeout: See `EngineLoop`.
    """

    def __init__(
        self, engine: Engine, *, stall_seconds: float = 60.0, queue_timeout: float | None = None
    ) -> None:
        self.engine = engine
        self._loop = EngineLoop(engine, self._deliver, queue_timeout)
        self._stall_seconds = stall_seconds
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._outlets: dict[str, Outlet] = {}
        self._wake = threading.Event()
        self._door = threading.Lock()  # who sends a command knows that the thread will see it
        self._closed = False  # under the lock: no command is taken any more
        self._stopping = False
        self._draining = False
        self._failure: BaseException | None = None
        self._last_turn = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="pw-engine", daemon=True)

    def start(self) -> None:
        """Start stepping."""
        self._thread.start()

    @property
    def info(self) -> EngineInfo:
        """What does not change while the engine lives."""
        return self.engine.info()

    async def generate(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of a request as they come; the last has `finish_reason` set.

        Closing the iterator aborts the request.

        Raises:
            RequestError: The request is refused, or the engine is dead or draining.
        """
        loop = asyncio.get_running_loop()
        stream: asyncio.Queue[RequestOutput | BaseException] = asyncio.Queue()

        def outlet(item: RequestOutput | BaseException) -> None:
            loop.call_soon_threadsafe(stream.put_nowait, item)

        if self._draining or not self._send(
            lambda: self._add(request_id, prompt_token_ids, params, outlet)
        ):
            raise _unavailable()
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

    async def precision_map(self) -> dict[str, Any]:
        """See `Engine.precision_map`."""
        answer: dict[str, Any] = await self._ask(self.engine.precision_map)
        return answer

    async def set_policy(self, policy: str) -> None:
        """See `Engine.set_policy`."""
        await self._ask(lambda: self.engine.set_policy(policy))

    @property
    def failed(self) -> bool:
        """Whether a fault of its own ended the engine; nothing brings it back."""
        return self._failure is not None

    @property
    def failure(self) -> str | None:
        """That fault in a line; None of an engine that has not failed."""
        error = self._failure
        return None if error is None else f"{type(error).__name__}: {error}"

    def healthy(self) -> bool:
        """Whether the thread lives and has made a turn of its loop lately."""
        if self._failure is not None or not self._thread.is_alive():
            return False
        return time.monotonic() - self._last_turn < self._stall_seconds

    async def shutdown(self, drain_seconds: float) -> None:
        """Take no more requests, finish what runs for at most so long, then stop."""
        self._draining = True
        deadline = time.monotonic() + drain_seconds
        while self._open() and time.monotonic() < deadline and self._thread.is_alive():
            await asyncio.sleep(0.02)
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)
        self.engine.close()

    def _open(self) -> bool:
        return bool(self._outlets) or not self._commands.empty()

    async def _ask(self, question: Callable[[], Any]) -> Any:
        """Have the engine's thread answer something between two steps."""
        answer: Future[Any] = Future()

        def ask() -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    if self._closed:
                        raise _unavailable()
                    answer.set_result(question())
                except Exception as error:  # the asker's, not the engine's
                    answer.set_exception(error)

        if not self._send(ask):
            raise _unavailable()
        return await asyncio.wrap_future(answer)

    def _send(self, command: Callable[[], None]) -> bool:
        """Have the engine's thread do something; False when it has ended."""
        with self._door:
            if self._closed:
                return False
            self._commands.put(command)
        self._wake.set()
        return True

    # -- in the engine's thread --------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._last_turn = time.monotonic()
                self._wake.clear()
                self._obey()
                if wait := self._loop.turn():
                    self._wake.wait(wait)
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
        if self._closed:
            _put(outlet, self._last_output(request_id))
            return
        try:
            self._loop.add(request_id, prompt, params)
        except Exception as error:  # the engine lives on, whatever it is
            if not isinstance(error, RequestError):
                logger.exception("request %s could not be added", request_id)
            _put(outlet, error)
        else:
            self._outlets[request_id] = outlet

    def _abort(self, request_id: str) -> None:
        if not self._closed:
            self._loop.abort(request_id)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            outlet = self._outlets.get(output.request_id)
            if output.finish_reason is not None:
                self._outlets.pop(output.request_id, None)
            if outlet is not None and not _put(outlet, output):
                self._outlets.pop(output.request_id, None)
                self.engine.abort(output.request_id)

    def _end_all(self) -> None:
        """Nobody may wait for ever: streams that are still open end with an error."""
        with self._door:
            self._closed = True
        self._obey()
        for request_id, outlet in self._outlets.items():
            _put(outlet, self._last_output(request_id))
        self._outlets.clear()

    def _last_output(self, request_id: str) -> RequestOutput:
        """What a stream gets when the engine ends before its request."""
        reason, code = "the engine stopped", "engine_stopped"
        if self._failure is not None:
            reason, code = "the engine failed", "engine_failed"
        return RequestOutput(request_id, finish_reason="error", error=reason, error_code=code)


def _unavailable() -> RequestError:
    return RequestError("the engine takes no more requests", code="engine_unavailable", status=503)


def _put(outlet: Outlet, item: RequestOutput | BaseException) -> bool:
    """Hand an item over; False when the event loop of its reader is closed."""
    try:
        outlet(item)
    except RuntimeError:
        return False
    return True
