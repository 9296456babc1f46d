"""An engine in another process, seen from the event loop.

Everything that is asked often is answered here: the engine sends its status several times a second,
which is also its sign of life. An engine that stays silent is stalled: its streams end with an
error, and it is not healthy until it speaks again. An engine whose process has ended has failed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from pw.engine.process import wire
from pw.engine.process.wire import EngineInfo
from pw.engine.request import EngineStatus, RequestOutput, SamplingParams
from pw.errors import RequestError
from pw.serving.errors import GenerationError
from pw.serving.process.engine_process import EngineProcess

logger = logging.getLogger("pw.serving")

MAX_OUTPUTS_BEHIND = 512  # of one sequence that its reader has not taken; then it is given up
MAX_UNSENT_BYTES = 64 << 20  # to an engine that does not read; then requests are refused
_STOP_SECONDS = 0.5  # for the process to end by itself
_TICK_SECONDS = 0.1  # between looks at how long the engine has been silent

Item = RequestOutput | Exception


class RemoteEngine:
    """Requests in, streams of outputs out, over the socket of an `EngineProcess`.

    Args:
        process: Of an engine that is ready. Ended by `shutdown`.
        ready: What it said when it was.
        stall_timeout: Seconds of silence after which the engine is stalled.
    """

    def __init__(
        self, process: EngineProcess, ready: wire.Ready, *, stall_timeout: float = 60.0
    ) -> None:
        self.info: EngineInfo = ready.info
        self._process, self._status = process, ready.status
        self._stall_timeout = stall_timeout
        self._streams: dict[str, asyncio.Queue[Item]] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_numbers = itertools.count()
        self._connected = asyncio.Event()
        self._transport: asyncio.WriteTransport | None = None
        self._watch: asyncio.Task[None] | None = None
        self._heard = time.monotonic()
        self._failure: str | None = None
        self._stalled = self._draining = self._stopping = False

    @property
    def pid(self) -> int:
        """The engine's process."""
        return self._process.pid

    def start(self) -> None:
        """Listen to the engine. Called in the event loop that uses it."""
        self._heard = time.monotonic()
        self._watch = asyncio.get_running_loop().create_task(self._connect_and_watch())

    async def generate(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of a request as they come; the last has `finish_reason` set.

        Closing the iterator aborts the request.

        Raises:
            RequestError: The request is refused, or the engine takes none now.
            GenerationError: The engine could not make sense of the request, by its own fault.
            ValueError: The id is in use.
        """
        await self._connected.wait()
        if request_id in self._streams:
            raise ValueError(f"request id is in use: {request_id}")
        self._send(self._checked(wire.Add(request_id, prompt_token_ids, params)))
        stream = self._streams[request_id] = asyncio.Queue()
        try:
            while True:
                item = await stream.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if item.finish_reason is not None:
                    return
        finally:
            if self._streams.get(request_id) is stream:
                del self._streams[request_id]
                self._abort([request_id])

    def abort(self, request_id: str) -> None:
        """Give a request up within one step. Unknown and finished ids are ignored."""
        if request_id in self._streams:
            self._abort([request_id])

    def status(self) -> EngineStatus:
        """The latest snapshot; the last one of an engine that has failed."""
        return self._status

    async def precision_map(self) -> dict[str, Any]:
        """See `Engine.precision_map`."""
        answer: dict[str, Any] = await self._ask(wire.GetPrecision)
        return answer

    async def set_policy(self, policy: str) -> None:
        """See `Engine.set_policy`."""
        await self._ask(lambda call: wire.SetPolicy(call, policy))

    @property
    def failed(self) -> bool:
        """Whether the engine's process has ended by itself; nothing brings it back."""
        return self._failure is not None

    @property
    def failure(self) -> str | None:
        """What the process has said at its end, or that it has ended."""
        return self._failure

    def healthy(self) -> bool:
        """Whether the engine's loop has made a turn lately."""
        return self._watch is not None and not (self.failed or self._stalled or self._stopping)

    async def shutdown(self, drain_seconds: float) -> None:
        """Take no more requests, finish what runs for at most so long, then end the process."""
        self._draining = True
        deadline = time.monotonic() + drain_seconds
        while self._streams and self.healthy() and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self._stopping = True
        self._end_all("the engine stopped", "engine_stopped")
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self._transport is not None:
            self._transport.abort()  # what the engine has not read needs no answer any more
        await asyncio.to_thread(self._process.end, _STOP_SECONDS)

    # -- to the engine -------------------------------------------------------------------------

    def _checked(self, message: wire.ToEngine) -> bytes:
        """A message as bytes, if the engine would take it now.

        Raises:
            RequestError: It would not, or the message has no such form.
        """
        if self._draining or not self.healthy():
            raise RequestError(self._why_not(), code="engine_unavailable", status=503)
        assert self._transport is not None
        if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            raise RequestError("the engine is behind", code="server_overloaded", status=503)
        return wire.frame(message)

    def _why_not(self) -> str:
        if self.failed:
            return "the engine failed"
        return "the engine is stalled" if self._stalled else "the engine takes no more requests"

    def _send(self, frame: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    def _abort(self, request_ids: list[str]) -> None:
        self._send(wire.frame(wire.Abort(request_ids)))

    async def _ask(self, message: Callable[[int], wire.ToEngine]) -> Any:
        """Send a question and wait for its answer.

        Raises:
            RequestError: The engine refuses it, or ends before it answers.
        """
        await self._connected.wait()
        call = next(self._call_numbers)
        self._send(self._checked(message(call)))
        answer = self._calls[call] = asyncio.get_running_loop().create_future()
        try:
            return await answer
        finally:
            del self._calls[call]

    # -- from the engine -----------------------------------------------------------------------

    async def _connect_and_watch(self) -> None:
        """Connect, then see for how long the engine has been silent."""
        loop = asyncio.get_running_loop()
        link = _Link(self._take, self._ended)
        transport, _ = await loop.create_unix_connection(lambda: link, sock=self._process.socket)
        self._transport = transport
        self._connected.set()
        while True:
            before = time.monotonic()
            await asyncio.sleep(_TICK_SECONDS)
            now = time.monotonic()
            # Where this process was held up, it could not hear: that is no silence.
            self._heard += max(0.0, now - before - 2 * _TICK_SECONDS)
            silent = now - self._heard
            if silent > self._stall_timeout and not self._stalled:
                logger.error("the engine is stalled: it has been silent for %.1f s", silent)
                self._stalled = True
                self._give_up_all("the engine is stalled", "engine_stalled")

    def _take(self, message: wire.FromEngine) -> None:
        """Deal with one message."""
        self._heard = time.monotonic()
        if self._stalled:
            self._stalled = False
            logger.warning("the engine goes on")
        if isinstance(message, wire.Outputs):
            if message.status is not None:
                self._status = message.status
            for output in message.outputs:
                self._pass_on(output)
        elif isinstance(message, wire.Status):
            self._status = message.status
        elif isinstance(message, wire.Refused):
            stream = self._streams.pop(message.request_id, None)
            if stream is not None:
                stream.put_nowait(_refusal(message.refusal))
        elif isinstance(message, wire.Answer):
            self._settle(message)
        elif isinstance(message, wire.Failed):
            self._failure = message.error

    def _pass_on(self, output: RequestOutput) -> None:
        """Give an output to its reader, unless that has fallen far behind."""
        stream = self._streams.get(output.request_id)
        if stream is None:
            return
        if output.finish_reason is not None:
            del self._streams[output.request_id]
        elif stream.qsize() >= MAX_OUTPUTS_BEHIND:
            del self._streams[output.request_id]
            self._abort([output.request_id])
            output = _last(output.request_id, "the client reads too slowly", "slow_reader")
        stream.put_nowait(output)

    def _settle(self, answer: wire.Answer) -> None:
        waiting = self._calls.get(answer.call)
        if waiting is None or waiting.done():
            return
        if answer.refusal is None:
            waiting.set_result(answer.value)
        else:
            waiting.set_exception(answer.refusal.unpack())

    def _ended(self) -> None:
        """The socket is closed: unless we did it, the engine has ended by itself."""
        if self._stopping:
            return
        how = self._failure or ""
        self._failure = how or "its process ended"
        self._end_all("the engine failed", "engine_failed")
        asyncio.get_running_loop().run_in_executor(None, self._bury, how)

    def _bury(self, how: str) -> None:
        """Say how the process ended."""
        logger.error("the engine process ended: %s", how or self._process.end(_STOP_SECONDS))

    def _give_up_all(self, error: str, code: str) -> None:
        """End all streams; the engine drops their requests when it reads again."""
        request_ids = list(self._streams)
        self._end_all(error, code)
        if request_ids:
            self._abort(request_ids)

    def _end_all(self, error: str, code: str) -> None:
        """Nobody may wait for ever: what is open ends with an error."""
        for request_id, stream in self._streams.items():
            stream.put_nowait(_last(request_id, error, code))
        self._streams.clear()
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(RequestError(error, code="engine_unavailable", status=503))


class _Link(asyncio.Protocol):
    """Our end of the socket: frames become messages."""

    def __init__(self, take: Callable[[wire.FromEngine], None], ended: Callable[[], None]) -> None:
        self._take, self._ended = take, ended
        self._inbox = wire.FrameBuffer()

    def data_received(self, data: bytes) -> None:
        for body in self._inbox.feed(data):
            self._take(wire.decode_from_engine(body))

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended()


def _refusal(refusal: wire.Refusal | None) -> Exception:
    if refusal is None:
        return GenerationError("the engine could not take the request")
    return refusal.unpack()


def _last(request_id: str, error: str, code: str) -> RequestOutput:
    return RequestOutput(request_id, finish_reason="error", error=error, error_code=code)
