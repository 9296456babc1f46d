"""The live page at `/`: static files of this package. They hold no data and need no key.

The page asks `/v1/pw/...` for what it shows, with the key that its reader gives it.
"""

from __future__ import annotations

import hashlib
from importlib.resources import files

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_HEADERS = {
    # Nothing from elsewhere, nothing inline, in nobody's frame; data from this server only.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "cache-control": "no-cache",  # always asks, and is told 304
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def _read() -> dict[str, tuple[bytes, str]]:
    """Path -> (content, media type) of every file of the page."""
    found = {}
    for file in files("pw.serving.operations").joinpath("dashboard").iterdir():
        media_type = _TYPES.get(file.name.rpartition(".")[2])
        if media_type is not None:
            path = "/" if file.name == "index.html" else f"/dashboard/{file.name}"
            found[path] = (file.read_bytes(), media_type)
    return found


def page_paths() -> frozenset[str]:
    """What `page_router` answers."""
    return frozenset(_read())


def page_router() -> APIRouter:
    """A route for each file, and none for anything else."""
    router = APIRouter(include_in_schema=False)
    for path, (content, media_type) in _read().items():
        _add(router, path, content, media_type)
    return router


def _add(router: APIRouter, path: str, content: bytes, media_type: str) -> None:
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**_HEADERS, "etag": tag}

    @router.get(path)
    async def file(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)
