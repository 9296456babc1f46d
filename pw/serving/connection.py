"""The client's side of the wire: does it still listen, and how a stream is written to it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, suppress
from typing import Any, TypeVar

import orjson
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pw.errors import RequestError
from pw.serving.errors import GenerationError, error_body

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

    Args:
        events: JSON values, one per event.
        resources: Closed before the last event, or when the client goes.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[Any], resources: AsyncExitStack) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._resources = resources

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; a client that goes away ends it silently."""
        with suppress(ClientDisconnect):  # outermost: the resources are told why they close
            async with self._resources:
                await while_connected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        last = b"[DONE]"
        try:
            async for event in self._events:
                await _send_event(send, orjson.dumps(event))
        except (RequestError, GenerationError) as error:
            last = orjson.dumps(error_body(error))
        except Exception as error:
            logger.exception("stream broke off")
            last = orjson.dumps(error_body(error))
        await self._resources.aclose()  # a client that asks again at `[DONE]` finds its place free
        await _send_event(send, last)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_event(send: Send, data: bytes) -> None:
    await send(
        {"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True}
    )
