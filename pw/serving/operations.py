"""Routes for people, dashboards and gateways: models, health, metrics, status."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from pw import __version__
from pw.serving.context import ServingContext
from pw.serving.wire import JsonResponse, JsonRoute


def operations_router(context: ServingContext) -> APIRouter:
    """All routes that do not generate."""
    router = APIRouter(route_class=JsonRoute)
    _add_models(router, context)
    _add_health(router, context)
    _add_status(router, context)
    return router


def _add_models(router: APIRouter, context: ServingContext) -> None:
    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": context.created,
            "owned_by": "pagedweight",
            "root": context.model_name,
            "parent": None,
            "max_model_len": context.engine.status().max_model_len,
        }

    @router.get("/v1/models")
    async def models() -> Response:
        """The served names."""
        return JsonResponse(
            {"object": "list", "data": [card(name) for name in context.config.model_names]}
        )

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """One served name."""
        context.check_model(name)
        return JsonResponse(card(name))


def _add_health(router: APIRouter, context: ServingContext) -> None:
    @router.get("/health/live")
    async def live() -> Response:
        """200 as long as the event loop answers."""
        return Response()

    @router.get("/health")
    @router.get("/health/ready")
    @router.get("/ready")
    @router.get("/ping")
    async def ready() -> Response:
        """200 when new requests are taken and served, else 503."""
        return Response(status_code=200 if context.ready else 503)


def _add_status(router: APIRouter, context: ServingContext) -> None:
    @router.get("/metrics")
    async def metrics() -> Response:
        """Prometheus' text format."""
        return Response(context.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/version")
    async def version() -> Response:
        """Version of this code."""
        return JsonResponse({"version": __version__})

    @router.get("/v1/pw/status")
    async def status() -> Response:
        """Everything the engine says about itself, and the server's own state."""
        snapshot = context.engine.status()
        body = asdict(snapshot)
        last_step = body.pop("last_step_time")
        body["bytes"]["total"] = snapshot.bytes.total
        body |= {
            "model": context.model_name,
            "version": __version__,
            "system_fingerprint": context.fingerprint,
            "ready": context.ready,
            "draining": context.gate.draining,
            "open_sequences": context.gate.open_sequences,
            "seconds_since_last_step": time.monotonic() - last_step if last_step else None,
        }
        return JsonResponse(body)
