"""JSON bodies in and out, through orjson."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import orjson
from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response


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
        return orjson.dumps(content, option=orjson.OPT_NON_STR_KEYS)
