"""The OpenAPI document: the framework's own, with the errors that are really sent."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

_TEXT_OR_NULL = {"anyOf": [{"type": "string"}, {"type": "null"}]}
_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"enum": ["invalid_request_error", "server_error"]},
                "param": _TEXT_OR_NULL,
                "code": _TEXT_OR_NULL,
            },
        }
    },
}
_PROBES = ("/health", "/ready", "/ping")
_FRAMEWORKS = ("HTTPValidationError", "ValidationError")  # 422s, which no client ever gets


def describe(app: FastAPI) -> dict[str, Any]:
    """`/openapi.json`, made once: operations may answer with OpenAI's error object."""
    if app.openapi_schema is not None:
        return app.openapi_schema
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for name in _FRAMEWORKS:
        schemas.pop(name, None)
    schemas["Error"] = _ERROR
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    refused = {"description": "The request's fault", "content": content}
    failed = {"description": "The server's fault", "content": content}
    not_ready = {"description": "Not ready, with the reason"}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            fault = not_ready if path.startswith(_PROBES) else failed
            operation["responses"] |= {"4XX": refused, "5XX": fault}
    app.openapi_schema = document
    return document
