"""Every failure as OpenAI's `{"error": {...}}`, those of the framework included."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pw.errors import RequestError
from pw.serving.wire import JsonResponse

logger = logging.getLogger("pw.serving")

MAX_MESSAGE_CHARS = 1000
CLIENT_CLOSED_REQUEST = 499  # never reaches the client; for logs and metrics

_CODES = {
    400: "invalid_value",
    404: "not_found",
    405: "method_not_allowed",
    408: "timeout",
    413: "request_too_large",
}
_FORMS = {
    "prompt": "a string, a list of strings, a list of token ids or a list of such lists",
    "stop": "a string or a list of strings",
}


class GenerationError(Exception):
    """The engine gave a sequence up for a reason that is not the client's; a 500."""

    def __init__(self, message: str, code: str = "server_error") -> None:
        super().__init__(message)
        self.code = code


def error_body(error: Exception) -> dict[str, Any]:
    """OpenAI's error object; what is not meant for users becomes "internal error"."""
    if isinstance(error, RequestError):
        text = f"{error.message} (hint: {error.hint})" if error.hint else error.message
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        fields = {"type": kind, "param": error.param, "code": error.code}
    elif isinstance(error, GenerationError):
        text = f"generation failed: {error}"
        fields = {"type": "server_error", "param": None, "code": error.code}
    else:
        text = "internal error"
        fields = {"type": "server_error", "param": None, "code": "server_error"}
    return {"error": {"message": _one_line(text[:MAX_MESSAGE_CHARS]), **fields}}


def _one_line(text: str) -> str:
    """The text without line breaks and control characters, which a client may have brought."""
    words = " ".join(text.split())
    return "".join(mark if mark.isprintable() else "\ufffd" for mark in words)


def error_response(
    error: Exception, *, retry_after: int, headers: Mapping[str, str] | None = None
) -> JsonResponse:
    """The response for a failure before the first byte of an answer."""
    status = error.status if isinstance(error, RequestError) else 500
    extra = dict(headers or {})
    if status == 503:
        extra["retry-after"] = str(retry_after)
    elif status == 500:
        extra["x-should-retry"] = "false"  # it would fail again; clients retry a 500 by default
    return JsonResponse(error_body(error), status, extra)


def install_error_handlers(
    app: FastAPI, *, retry_after: int, on_refusal: Callable[[str], None]
) -> None:
    """Answer every known failure of the app in OpenAI's shape; `CatchAll` does the others.

    Args:
        app: The app to change.
        retry_after: Seconds that a 503 asks clients to wait.
        on_refusal: Called with the code of each refused request, for metrics.
    """

    async def refused(_request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        on_refusal(error.code)
        headers = {"www-authenticate": "Bearer"} if error.status == 401 else None
        return error_response(error, retry_after=retry_after, headers=headers)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return await refused(request, validation_error(error))

    async def framework(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return error_response(
            framework_error(request, error), retry_after=retry_after, headers=error.headers
        )

    async def gone(_request: Request, _error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    async def failed(_request: Request, error: Exception) -> Response:
        return error_response(error, retry_after=retry_after)

    handlers: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
        RequestError: refused,
        RequestValidationError: invalid,
        HTTPException: framework,
        ClientDisconnect: gone,
        GenerationError: failed,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)


class CatchAll:
    """ASGI middleware: a bug becomes an ordinary 500, its traceback one record of ours.

    The framework's own answer to a bug raises it again, which makes uvicorn log it once more and
    close a connection that the client may just be using for its next request.
    """

    def __init__(self, app: ASGIApp, retry_after: int) -> None:
        self._app, self._retry_after = app, retry_after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; what has begun to be answered can only be broken off."""
        started = False

        async def noted(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception as error:
            if started or scope["type"] != "http":
                raise
            logger.exception("request %s failed", scope.get("pw.request_id", ""))
            response = error_response(error, retry_after=self._retry_after)
            await response(scope, receive, send)


def validation_error(error: RequestValidationError) -> RequestError:
    """The most specific complaint of pydantic, in one line without the client's input."""
    errors = error.errors()
    if errors[0]["type"] == "json_invalid":
        return RequestError(f"body is not JSON: {errors[0]['ctx']['error']}")
    deepest = max(errors, key=lambda each: len(each["loc"]))  # the others name a union's forms
    path = [str(part) for part in deepest["loc"][1:] if part != "str" and "[" not in str(part)]
    if not path:
        return RequestError("body must be a JSON object with content-type application/json")
    if path[0] in _FORMS:
        return RequestError(f"{path[0]} must be {_FORMS[path[0]]}", param=path[0])
    return RequestError(f"{'.'.join(path)}: {deepest['msg']}", param=path[0])


def framework_error(request: Request, error: HTTPException) -> RequestError:
    """An unknown route, a wrong method, a body that is too large."""
    status, message = error.status_code, str(error.detail)
    if status in (404, 405):
        message = f"{HTTPStatus(status).phrase.lower()}: {request.method} {request.url.path}"
    return RequestError(message, code=_CODES.get(status, "invalid_value"), status=status)
