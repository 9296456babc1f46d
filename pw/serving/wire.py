"""JSON bodies in and out, through orjson."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import orjson
from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

# Legal inside JSON, but clients that read a stream with `str.splitlines` end a line there.
_LINE_ENDS = {
    "\u2028".encode(): rb"\u2028",
    "\u2029".encode(): rb"\u2029",
    "\x85".encode(): rb"\u0085",
}


def dumps(value: Any) -> bytes:
    """One JSON value in one line, by everybody's idea of a line.

    Integer keys become strings, NaN and Infinity null.
    """
    data = orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)
    if b"\xe2\x80" in data or b"\xc2\x85" in data:  # rare; only then is it copied
        for raw, escaped in _LINE_ENDS.items():
            data = data.replace(raw, escaped)
    return data


class JsonRoute(APIRoute):
    """Reads bodies with orjson: no NaN, no lone surrogates that no tokenizer can encode."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The route's handler, given a request that parses that way."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_JsonRequest(request.scope, request.receive))

        return handle


class _JsonRequest(Request):
    async def json(self) -> Any:
        return orjson.loads(await self.body())


class JsonResponse(Response):
    """JSON through orjson, which writes no NaN or Infinity. Integer keys become strings."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Serialize one JSON value."""
        return dumps(content)
