"""HTTP/1.1 on one connection: uvicorn's own, with errors in OpenAI's shape and less patience."""

from __future__ import annotations

import asyncio
import sys
import uuid
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from pw.errors import RequestError
from pw.serving.errors import error_body
from pw.serving.wire import dumps

HEAD_SECONDS = 60.0  # for the head of a request, and before the first one of a connection
TOO_LARGE = 431  # of a head


class HttpProtocol(H11Protocol):
    """A connection that is closed when no request comes, or only bit by bit."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._waiting: asyncio.TimerHandle | None = None
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Read on; what is half a head may not stay so for ever."""
        super().data_received(data)
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self._wait()
        else:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._stop_waiting()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP; called by the base class while it handles h11's error."""
        error = sys.exception()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()  # an answer has begun: there is no place for another one
            return
        large = isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == TOO_LARGE
        code, status = ("headers_too_large", TOO_LARGE) if large else ("invalid_value", 400)
        self._refuse(RequestError(f"{msg} {error}", code=code, status=status))

    def _refuse(self, refusal: RequestError) -> None:
        body = dumps(error_body(refusal))
        headers: list[tuple[bytes, bytes]] = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"x-request-id", uuid.uuid4().hex.encode()),
            (b"connection", b"close"),
        ]
        events: list[Any] = [
            h11.Response(status_code=refusal.status, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ]
        for event in events:
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _wait(self) -> None:
        if self._waiting is None:
            self._waiting = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
