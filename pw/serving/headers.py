"""A bound on the number of headers; their size has one in the HTTP parser."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from pw.errors import RequestError
from pw.serving.errors import error_response

MAX_HEADERS = 100
MAX_HEADER_BYTES = 64 << 10  # of all together, the request line included


class HeaderLimit:
    """ASGI middleware: a request with more headers than anybody needs is a 431."""

    def __init__(self, app: ASGIApp, most: int = MAX_HEADERS) -> None:
        self._app, self._most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on if it has few enough."""
        if scope["type"] != "http" or len(scope["headers"]) <= self._most:
            await self._app(scope, receive, send)
            return
        refusal = RequestError(
            f"request must have at most {self._most} headers: {len(scope['headers'])}",
            code="too_many_headers",
            status=431,
        )
        await error_response(refusal, retry_after=1)(scope, receive, send)
