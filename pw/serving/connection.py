"""The client's side of the wire: does it still listen, and how a stream is written to it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pw.errors import RequestError
from pw.serving.errors import GenerationError, error_body
from pw.serving.wire import dumps

logger = logging.getLogger("pw.serving")

T = TypeVar("T")


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """Await `work` unless the client goes first; then cancel it.

    Args:
        receive: The request's ASGI channel, its body already read.
        work: What the client waits for.

    Raises:
        ClientDisconnect: The client went.
    """

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


class EventStream(Response):
    """Server-sent events, ended by `[DONE]`, or by an error object when it breaks off.

    Silence is broken by comments, which keep proxies from closing the connection. A client that
    reads nothing for a long time counts as gone.

    Args:
        events: JSON values, one per event.
        resources: Closed before the last event, or when the client goes.
        headers: More headers of the response.
        ping_interval: Seconds of silence before a comment.
        send_timeout: Seconds in which the client must take what was sent.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[Any],
        resources: AsyncExitStack,
        *,
        headers: dict[str, str],
        ping_interval: float,
        send_timeout: float,
    ) -> None:
        fixed = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(headers=fixed | headers)
        del self.headers["content-length"]
        self._events = events
        self._resources = resources
        self._ping_interval = ping_interval
        self._send_timeout = send_timeout
        self._sending = asyncio.Lock()  # a comment must not cut into an event
        self._last_sent = 0.0  # event loop seconds

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; a client that goes away ends it silently."""
        with suppress(ClientDisconnect):  # outermost: the resources are told why they close
            async with self._resources:
                await while_connected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        pings = asyncio.create_task(self._ping(send))
        try:
            await self._send_events(send)
        finally:
            pings.cancel()
            await asyncio.gather(pings, return_exceptions=True)

    async def _send_events(self, send: Send) -> None:
        last = b"[DONE]"
        try:
            async for event in self._events:
                await self._send_data(send, dumps(event))
        except ClientDisconnect:
            raise
        except (RequestError, GenerationError) as error:
            last = dumps(error_body(error))
        except Exception as error:
            logger.exception("stream broke off")
            last = dumps(error_body(error))
        await self._resources.aclose()  # a client that asks again at `[DONE]` finds its place free
        await self._send_data(send, last)
        await self._send_bytes(send, b"", more=False)

    async def _ping(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        self._last_sent = clock()
        while True:
            await asyncio.sleep(self._last_sent + self._ping_interval - clock())
            if clock() - self._last_sent >= self._ping_interval:
                await self._send_bytes(send, b": ping\n\n")

    async def _send_data(self, send: Send, data: bytes) -> None:
        await self._send_bytes(send, b"data: " + data + b"\n\n")

    async def _send_bytes(self, send: Send, data: bytes, *, more: bool = True) -> None:
        async with self._sending:
            try:
                async with asyncio.timeout(self._send_timeout):
                    await send({"type": "http.response.body", "body": data, "more_body": more})
            except TimeoutError:
                logger.info("a client read nothing for %g s: gone", self._send_timeout)
                raise ClientDisconnect from None
            self._last_sent = asyncio.get_running_loop().time()
