"""A request that has been read whole, and an ASGI app that answers it elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope

from pw.errors import RequestError

MESSAGES_BEHIND = 64  # that an app may be ahead of its reader


@dataclass(frozen=True)
class Call:
    """A request of HTTP: what of an ASGI scope can travel, and its body."""

    method: str
    path: str
    query_string: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""
    client: tuple[str, int] | None = None
    http_version: str = "1.1"
    scheme: str = "http"

    @classmethod
    def of(cls, scope: Scope, body: bytes) -> Call:
        """The call of a scope; its request id replaces what the client sent."""
        headers = tuple((bytes(name), bytes(value)) for name, value in scope["headers"])
        if (request_id := scope.get("pw.request_id")) is not None:
            kept = tuple(pair for pair in headers if pair[0] != b"x-request-id")
            headers = (*kept, (b"x-request-id", request_id.encode()))
        client = scope.get("client")
        return cls(
            method=scope["method"],
            path=scope["path"].removeprefix(scope.get("root_path", "")),
            query_string=scope.get("query_string", b""),
            headers=headers,
            body=body,
            client=(client[0], client[1]) if client else None,
            http_version=scope.get("http_version", "1.1"),
            scheme=scope.get("scheme", "http"),
        )

    def scope(self) -> Scope:
        """An ASGI scope."""
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": self.http_version,
            "method": self.method,
            "scheme": self.scheme,
            "path": self.path,
            "raw_path": self.path.encode(),
            "root_path": "",
            "query_string": self.query_string,
            "headers": list(self.headers),
            "client": self.client,
            "server": None,
        }


@dataclass
class Answer:
    """A whole response."""

    status: int = 500
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""

    def add(self, message: Message) -> None:
        """Take one message of an app in."""
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], list(message.get("headers", ()))
        elif message["type"] == "http.response.body":
            self.body += message.get("body", b"")


async def read_body(receive: Receive, max_bytes: int) -> bytes | None:
    """The body of a request; None when its client goes before it is whole.

    Raises:
        RequestError: 413, as soon as it is too large.
    """
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise RequestError(
                f"request body must be at most {max_bytes} bytes",
                code="request_too_large",
                status=413,
            )
        if not message.get("more_body", False):
            return bytes(body)


async def respond(app: ASGIApp, call: Call) -> AsyncIterator[Message]:
    """The messages with which an app answers a call.

    Closing or cancelling the iterator tells the app that its client has gone, and waits for it.
    """
    messages: asyncio.Queue[Message | None] = asyncio.Queue(MESSAGES_BEHIND)
    bodies = [{"type": "http.request", "body": call.body, "more_body": False}]
    gone = asyncio.Event()

    async def receive() -> Message:
        if bodies:
            return bodies.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if not gone.is_set():
            await messages.put(message)

    async def run() -> None:
        try:
            await app(call.scope(), receive, send)
        finally:
            if not gone.is_set():
                await messages.put(None)

    task = asyncio.create_task(run())
    try:
        while (message := await messages.get()) is not None:
            yield message
        await task  # an app that failed says so here
    finally:
        gone.set()
        while not messages.empty():  # a `send` that waits for room
            messages.get_nowait()
        await asyncio.gather(task, return_exceptions=True)


async def answer(app: ASGIApp, call: Call) -> Answer:
    """The whole response of an app to a call."""
    whole = Answer()
    messages: Any = respond(app, call)
    async with aclosing(messages):
        async for message in messages:
            whole.add(message)
    return whole
