"""What happens around every request: its id, its metrics, its key."""

from __future__ import annotations

import hashlib
import hmac
import re
import time
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pw.errors import RequestError
from pw.serving.errors import error_response
from pw.serving.metrics import ServingMetrics

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_KNOWN_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/ready", "/ping"})


class RequestIdentity:
    """Echoes `x-request-id`, or makes one; a value that could forge a log line is replaced."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on under its id."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope["pw.request_id"] = request_id

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self._app(scope, receive, with_id)


class HttpMetrics:
    """Counts and times requests by route pattern."""

    def __init__(self, app: ASGIApp, metrics: ServingMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on and note how it ended."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.monotonic()
        status = 500  # when the app raises before it answers

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            handler = getattr(scope.get("route"), "path", "unknown")
            method = scope["method"] if scope["method"] in _KNOWN_METHODS else "unknown"
            self._metrics.http(handler, method, status, time.monotonic() - start)


class RequireKey:
    """Every route needs an API key, but those that tell the server's health."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], retry_after: int) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]
        self._retry_after = retry_after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on if it may."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._knows(scope):
            await self._app(scope, receive, send)
            return
        refusal = RequestError("API key is missing or wrong", code="invalid_api_key", status=401)
        response = error_response(
            refusal, retry_after=self._retry_after, headers={"www-authenticate": "Bearer"}
        )
        await response(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        header: bytes = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = header.partition(b" ")
        given = _digest(key.strip())
        known = [hmac.compare_digest(given, digest) for digest in self._digests]  # all, always
        return scheme.lower() == b"bearer" and any(known)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
