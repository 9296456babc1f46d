"""Bounds on what one request and all of them may ask for, and the gate that enforces them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pw.engine.request import MAX_LOGPROBS
from pw.errors import ConfigError, RequestError


@dataclass(frozen=True)
class ServingLimits:
    """Every multiplier a client controls has a bound here."""

    max_n: int = 16  # choices per prompt
    max_sequences: int = 256  # n x prompts of one request
    max_open_sequences: int = 320  # running and queued, all requests; max-num-seqs + queue
    max_queued_tokens: int | None = None  # of prompts without a first token, all requests
    max_body_bytes: int = 8 << 20
    max_messages: int = 4096  # messages of one conversation
    max_tools: int = 128  # of one request
    max_stop_chars: int = 4096  # of all stop strings of one request
    max_logprobs: int = MAX_LOGPROBS  # alternatives of a token
    retry_after_seconds: int = 1
    request_timeout: float | None = None  # seconds from a request's arrival to its last byte
    sse_ping_interval: float = 15.0  # seconds of silence in a stream
    send_timeout: float = 60.0  # seconds in which a client must read something
    body_timeout: float = 60.0  # seconds in which more of a request's body must come
    buffered_outputs: int = 64  # of one sequence, before the engine's side must wait

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be positive: {value}")
        if self.max_logprobs > MAX_LOGPROBS:
            raise ConfigError(f"max_logprobs must be at most {MAX_LOGPROBS}: {self.max_logprobs}")

    def check_sequences(self, n: int, prompts: int) -> None:
        """Refuse a request whose choices or prompts are too many.

        Raises:
            RequestError: With the count and the bound.
        """
        if n > self.max_n:
            raise RequestError(f"n must be at most {self.max_n}: {n}", param="n")
        if n * prompts > self.max_sequences:
            raise RequestError(
                f"n times the number of prompts must be at most {self.max_sequences}: "
                f"{n} x {prompts}",
                param="prompt",
            )

    def check_logprobs(self, count: int | None, param: str) -> None:
        """Refuse more alternatives than the server gives.

        Raises:
            RequestError: With the count and the bound.
        """
        if count is not None and not 0 <= count <= self.max_logprobs:
            raise RequestError(
                f"{param} must be between 0 and {self.max_logprobs}: {count}", param=param
            )

    def check_tools(self, tools: int) -> None:
        """Refuse too many tools.

        Raises:
            RequestError: With the count and the bound.
        """
        if tools > self.max_tools:
            raise RequestError(f"tools must be at most {self.max_tools}: {tools}", param="tools")

    def check_messages(self, messages: int) -> None:
        """Refuse a conversation of too many turns.

        Raises:
            RequestError: With the count and the bound.
        """
        if messages > self.max_messages:
            raise RequestError(
                f"messages must be at most {self.max_messages}: {messages}", param="messages"
            )


class AdmissionGate:
    """Counts open sequences: full or draining, it refuses with 503 and `Retry-After`."""

    def __init__(self, limits: ServingLimits) -> None:
        self._limits = limits
        self.open_sequences = 0
        self.draining = False

    def refusal(self) -> RequestError | None:
        """Why no request at all would be admitted now; None when some would be."""
        if self.draining:
            return shutting_down()
        if self.open_sequences >= self._limits.max_open_sequences:
            return self._full()
        return None

    @contextmanager
    def admit(self, sequences: int) -> Iterator[None]:
        """Hold places for all sequences of a request, or for none.

        Raises:
            RequestError: 503 when the server drains or its queue is full; 400 when it could
                never hold so many.
        """
        bound = self._limits.max_open_sequences
        if self.draining:
            raise shutting_down()
        if sequences > bound:
            raise RequestError(
                f"request has more sequences than the server may queue: {sequences} > {bound}"
            )
        if self.open_sequences + sequences > bound:
            raise self._full()
        self.open_sequences += sequences
        try:
            yield
        finally:
            self.open_sequences -= sequences

    def _full(self) -> RequestError:
        bound = self._limits.max_open_sequences
        return RequestError(
            f"queue is full: {self.open_sequences} of {bound} sequences are open",
            code="server_overloaded",
            status=503,
        )


def timed_out(seconds: float) -> RequestError:
    """The end of a request that took too long."""
    return RequestError(f"request took longer than {seconds:g} s", code="timeout", status=504)


def shutting_down() -> RequestError:
    """The refusal of a server that drains."""
    return RequestError("server is shutting down", code="engine_unavailable", status=503)


class BodyLimit:
    """ASGI middleware: bounds on the body of a request.

    Args:
        app: Behind it.
        max_bytes: A body over them is a 413, declared or streamed.
        patience: Seconds; a body of which nothing more comes for so long is a 408.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, patience: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._patience = patience

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its body watched."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        header = dict(scope["headers"]).get(b"content-length", b"0")
        declared = int(header) if header.isdigit() else 0
        received = 0
        complete = False

        async def limited() -> Message:
            nonlocal received, complete
            if declared > self._max_bytes:
                raise self._too_large()
            try:
                async with asyncio.timeout(None if complete else self._patience):
                    message = await receive()
            except TimeoutError:
                raise self._too_slow() from None
            complete = not message.get("more_body", False)
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise self._too_large()
            return message

        await self._app(scope, limited, send)

    def _too_large(self) -> HTTPException:
        return HTTPException(
            413,
            f"request body must be at most {self._max_bytes} bytes",
            headers={"connection": "close"},
        )

    def _too_slow(self) -> HTTPException:
        return HTTPException(
            408,
            f"nothing more of the request body came for {self._patience:g} s",
            headers={"connection": "close"},
        )
