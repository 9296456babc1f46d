"""The app in front of all replicas: reads a request, sends it to one, and again if that one fails.

Nothing of an answer is passed on before its first byte of body has come. Until then a replica that
is lost, refuses or breaks costs the client nothing: another one gets the request. Afterwards a
stream ends with an error event, as it does behind one server.
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pw.errors import RequestError
from pw.serving.connection import while_connected
from pw.serving.errors import GenerationError, error_body, error_response
from pw.serving.headers import MAX_HEADER_BYTES, HeaderLimit
from pw.serving.middleware import RequestIdentity, RequireKey
from pw.serving.replicas.calls import Call, read_body
from pw.serving.replicas.choice import Routing
from pw.serving.replicas.overview import Overview
from pw.serving.replicas.prefixes import prefix_keys
from pw.serving.replicas.protocol import TAKEN, ReplicaLostError, Replicas

logger = logging.getLogger("pw.serving.replicas")

GENERATING = frozenset({"/v1/completions", "/v1/chat/completions"})
_ADDRESSED = re.compile(r"(/replicas/([A-Za-z0-9_-]{1,64}))/.*")
_LOST_CODES = {"engine_failed", "engine_stalled", "engine_stopped"}  # of an answer with status 500


@dataclass(frozen=True)
class IngressSettings:
    """What the ingress allows, beside what each replica does."""

    max_body_bytes: int = 8 << 20
    attempts: int = 3  # replicas that a request is sent to at most
    retry_after_seconds: int = 1
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_keys: tuple[str, ...] = field(default=(), repr=False)


def create_ingress(replicas: Replicas, settings: IngressSettings) -> ASGIApp:
    """The whole app: keys and headers are judged before a body is read."""
    app: ASGIApp = Ingress(replicas, settings)
    retry_after = settings.retry_after_seconds
    app = RequireKey(app, settings.api_keys, settings.admin_keys, retry_after)
    return Unnamed(RequestIdentity(HeaderLimit(Addressed(app))))


class Unnamed:
    """ASGI middleware: no `x-request-id` in responses, for Serve's proxy puts its own there.

    It is the same: the proxy takes the client's, or makes one and sends it along.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""

        async def without(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = [each for each in message["headers"] if each[0] != b"x-request-id"]
                message = {**message, "headers": kept}
            await send(message)

        await self._app(scope, receive, without)


class Addressed:
    """ASGI middleware: a path `/replicas/<id>/...` is meant for one replica.

    That part of the path becomes the root path, so that all behind sees what the replica will see;
    the id stands in `scope["pw.replica"]`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] == "http":
            root = scope.get("root_path", "")
            if match := _ADDRESSED.fullmatch(scope["path"].removeprefix(root)):
                scope = {**scope, "root_path": root + match[1], "pw.replica": match[2]}
        await self._app(scope, receive, send)


class Ingress:
    """Sends each request to a replica and its answer to the client.

    Args:
        replicas: Who answers.
        settings: Bounds.
    """

    def __init__(self, replicas: Replicas, settings: IngressSettings) -> None:
        self._replicas, self._settings = replicas, settings
        self._overview = Overview(replicas)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            return  # there are no web sockets here
        try:
            await self._answer(scope, receive, send)
        except ClientDisconnect:
            return
        except RequestError as error:
            headers = {"connection": "close"} if error.status == 413 else None
            retry_after = self._settings.retry_after_seconds
            response = error_response(error, retry_after=retry_after, headers=headers)
            await response(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        _check_size(scope)
        body = await read_body(receive, self._settings.max_body_bytes)
        if body is None:
            return
        call = Call.of(scope, body)
        only = scope.get("pw.replica")
        if only is None:
            own = await while_connected(receive, self._overview.answer(call))
            if own is not None:
                await own(scope, receive, send)
                return
        keys = prefix_keys(body) if call.path in GENERATING else ()
        await while_connected(receive, self._forward(call, Routing(keys, only=only), send))

    async def _forward(self, call: Call, routing: Routing, send: Send) -> None:
        """Try replicas until one's answer has begun; then pass it on.

        Raises:
            RequestError: 503, none could.
        """
        attempts = self._settings.attempts if routing.only is None else 1
        for left in reversed(range(attempts)):
            attempt = _Attempt(self._replicas, call, routing, last=not left)
            try:
                async with aclosing(attempt.messages()) as messages:
                    async for message in messages:
                        await send(message)
                return
            except _TryAnotherError as error:
                logger.warning("%s: %s; %d attempts left", call.path, error, left)
                routing = Routing(routing.keys, (*routing.avoid, error.replica), routing.only)
        raise RequestError("no replica could answer", code="engine_unavailable", status=503)


def _check_size(scope: Scope) -> None:
    """Refuse headers as large as no parser of ours would take; Serve's proxy takes them.

    Raises:
        RequestError: 431.
    """
    size = sum(len(name) + len(value) for name, value in scope["headers"])
    if size > MAX_HEADER_BYTES:
        raise RequestError(
            f"headers must be at most {MAX_HEADER_BYTES} bytes: {size}",
            code="headers_too_large",
            status=431,
        )


class _TryAnotherError(Exception):
    """Nothing of the answer has been sent, and another replica may do better."""

    def __init__(self, replica: str, why: str) -> None:
        super().__init__(f"replica {replica or '?'} {why}")
        self.replica = replica


class _Attempt:
    """One replica's answer to a call."""

    def __init__(self, replicas: Replicas, call: Call, routing: Routing, *, last: bool) -> None:
        self._replicas, self._call, self._routing = replicas, call, routing
        self._last = last  # what this replica says is passed on, whatever it is
        self._replica = ""
        self._head: Message | None = None  # kept back until the body begins
        self._begun = self._ended = False

    async def messages(self) -> AsyncGenerator[Message, None]:
        """What the client gets.

        Raises:
            _TryAnotherError: Before the first message.
        """
        answers: Any = self._replicas.send(self._call, self._routing)
        try:
            async with aclosing(answers):
                async for message in answers:
                    for ready in self._take(message):
                        yield ready
            if not self._ended:
                raise ReplicaLostError("it broke off")
        except ReplicaLostError as error:
            if not self._begun:
                raise _TryAnotherError(self._replica, f"was lost: {error}") from error
            logger.warning("%s: replica %s was lost", self._call.path, self._replica)
            for ready in self._broken_off():
                yield ready

    def _take(self, message: Message) -> list[Message]:
        """The messages that may be sent now.

        Raises:
            _TryAnotherError: The replica cannot answer.
        """
        if message["type"] == TAKEN:
            self._replica = message["replica"]
            return []
        if message["type"] == "http.response.start":
            self._head = message
            return []
        if not self._begun:
            assert self._head is not None
            if not self._last and self._failed(self._head["status"], message.get("body", b"")):
                raise _TryAnotherError(self._replica, f"answered {self._head['status']}")
            self._begun, self._ended = True, not message.get("more_body", False)
            return [self._named(self._head), message]
        self._ended = not message.get("more_body", False)
        return [message]

    @staticmethod
    def _failed(status: int, body: bytes) -> bool:
        """Whether an answer speaks of the replica and not of the request."""
        if status == 503:
            return True
        if status != 500:
            return False
        try:
            return orjson.loads(body)["error"]["code"] in _LOST_CODES
        except (ValueError, KeyError, TypeError):
            return False

    def _named(self, head: Message) -> Message:
        name = (b"x-pw-replica", self._replica.encode())
        return {**head, "headers": [*head.get("headers", ()), name]}

    def _broken_off(self) -> list[Message]:
        """The end of a stream whose replica is gone.

        Raises:
            ReplicaLostError: The answer is no stream of events: cutting it off is all there is.
        """
        assert self._head is not None
        headers = dict(self._head.get("headers", ()))
        if self._ended:
            return []
        if not headers.get(b"content-type", b"").startswith(b"text/event-stream"):
            raise ReplicaLostError("in the middle of an answer")
        error = GenerationError("the replica was lost", "engine_failed")
        data = b"data: " + orjson.dumps(error_body(error)) + b"\n\n"
        return [{"type": "http.response.body", "body": data, "more_body": False}]


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
