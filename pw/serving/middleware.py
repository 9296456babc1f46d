"""What happens around every request: its id, its metrics, its key."""

from __future__ import annotations

import hashlib
import hmac
import re
import time
import uuid
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pw.errors import RequestError
from pw.serving.errors import error_response
from pw.serving.limits import AdmissionGate
from pw.serving.operations.metrics import ServingMetrics
from pw.serving.operations.page import page_paths

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
            told: str = scope.get("pw.handler", "unknown")
            handler: str = getattr(scope.get("route"), "path", told)
            method = scope["method"] if scope["method"] in _KNOWN_METHODS else "unknown"
            self._metrics.http(handler, method, status, time.monotonic() - start)


class TurnAway:
    """Refuses what cannot be admitted before anything is spent on it, its body not even read.

    At many times the load that a server can bear, what it does for those that it turns away is
    taken from those that it serves.

    Args:
        app: Behind it.
        gate: Knows whether anything can be admitted.
        paths: Of routes that need a place.
        retry_after: Seconds, of refusals.
        on_refusal: Called with the code of each.
    """

    def __init__(
        self,
        app: ASGIApp,
        gate: AdmissionGate,
        paths: frozenset[str],
        retry_after: int,
        on_refusal: Callable[[str], None],
    ) -> None:
        self._app, self._gate, self._paths = app, gate, paths
        self._retry_after, self._on_refusal = retry_after, on_refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on if there may be room for it."""
        path = served_path(scope)
        refusal = self._gate.refusal() if path in self._paths else None
        if refusal is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        scope["pw.handler"] = path
        self._on_refusal(refusal.code)
        await error_response(refusal, retry_after=self._retry_after)(scope, receive, send)


class RequireKey:
    """Every route needs an API key, but those of the server's health and of the live page.

    Routes find in `scope["pw.role"]` what the key makes of its bearer: "admin", "user" or None.

    Args:
        app: Behind it.
        keys: Of users; empty: routes need none.
        admin_keys: Of those who may also change the server.
        retry_after: Seconds, of refusals.
    """

    def __init__(
        self, app: ASGIApp, keys: Sequence[str], admin_keys: Sequence[str], retry_after: int
    ) -> None:
        self._app = app
        self._roles = [
            *((_digest(key.encode()), "user") for key in keys),
            *((_digest(key.encode()), "admin") for key in admin_keys),
        ]
        self._open = not keys
        self._open_paths = OPEN_PATHS | page_paths()
        self._retry_after = retry_after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on if it may."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        role = scope["pw.role"] = self._role(scope)
        if self._open or role is not None or served_path(scope) in self._open_paths:
            await self._app(scope, receive, send)
            return
        response = error_response(
            wrong_key(), retry_after=self._retry_after, headers={"www-authenticate": "Bearer"}
        )
        await response(scope, receive, send)

    def _role(self, scope: Scope) -> str | None:
        header: bytes = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = header.partition(b" ")
        given = _digest(key.strip())
        held = [role for known, role in self._roles if hmac.compare_digest(given, known)]
        return max(held, default=None, key="admin".__eq__) if scheme.lower() == b"bearer" else None


def served_path(scope: Scope) -> str:
    """The path of a request without the prefix under which a proxy shows the server."""
    path: str = scope.get("path", "")
    return path.removeprefix(scope.get("root_path", ""))  # that uvicorn put there


def wrong_key() -> RequestError:
    """The refusal of a request without a key."""
    return RequestError("API key is missing or wrong", code="invalid_api_key", status=401)


def check_admin(scope: Scope, *, open_to_admins: bool) -> None:
    """Let only bearers of an admin key pass.

    Args:
        scope: Of the request.
        open_to_admins: Whether there are admin keys at all.

    Raises:
        RequestError: 401 without a key, 403 with one of a user or where nobody may pass.
    """
    role = scope.get("pw.role")
    if role == "admin":
        return
    if open_to_admins and role is None:
        raise wrong_key()
    hint = "use an admin key" if open_to_admins else "serve with --admin-key"
    raise RequestError("this needs an admin key", code="permission_denied", status=403, hint=hint)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
