"""Routes for people, dashboards and gateways: models, health, metrics, status, what goes on now."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from pw import __version__
from pw.serving.context import ServingContext
from pw.serving.operations.page import page_router
from pw.serving.operations.timeline import INTERVAL_SECONDS
from pw.serving.wire import JsonResponse, JsonRoute

_REQUESTS_SHOWN = 100


def operations_router(context: ServingContext) -> APIRouter:
    """All routes that do not generate."""
    router = APIRouter(route_class=JsonRoute)
    _add_models(router, context)
    _add_health(router, context)
    _add_status(router, context)
    _add_views(router, context)
    router.include_router(page_router())
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
    # Balancers and monitors often ask with HEAD; the server then sends no body.
    @router.head("/health/live", include_in_schema=False)
    @router.get("/health/live")
    async def live() -> Response:
        """200 as long as the event loop answers."""
        return Response()

    @router.head("/health", include_in_schema=False)
    @router.get("/health")
    @router.head("/health/ready", include_in_schema=False)
    @router.get("/health/ready")
    @router.head("/ready", include_in_schema=False)
    @router.get("/ready")
    @router.head("/ping", include_in_schema=False)
    @router.get("/ping")
    async def ready() -> Response:
        """200 when new requests are taken and served, else 503 with the reason."""
        reason = context.health.not_ready()
        if reason is None:
            return Response()
        detail = context.health.detail()
        body = {"reason": reason} | ({} if detail is None else {"detail": detail})
        return JsonResponse(body, status_code=503)


def _add_status(router: APIRouter, context: ServingContext) -> None:
    @router.get("/metrics")
    async def metrics() -> Response:
        """Prometheus' text format."""
        return Response(context.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/version")
    async def version() -> Response:
        """Version of this code."""
        return JsonResponse({"version": __version__})

    @router.get("/load")
    async def load() -> Response:
        """Sequences that run or wait, for routers."""
        return JsonResponse({"server_load": context.gate.open_sequences})

    @router.get("/v1/pw/status")
    async def status() -> Response:
        """Everything the engine says about itself, and the server's own state."""
        snapshot = context.engine.status()
        body = asdict(snapshot)
        last_step = body.pop("last_step_time")
        body["bytes"]["total"] = snapshot.bytes.total
        reason = context.health.not_ready()
        body |= {
            "model": context.model_name,
            "version": __version__,
            "system_fingerprint": context.fingerprint,
            "ready": reason is None,
            "not_ready_reason": reason,
            "draining": context.gate.draining,
            "open_sequences": context.gate.open_sequences,
            "seconds_since_last_step": time.monotonic() - last_step if last_step else None,
        }
        return JsonResponse(body)


def _add_views(router: APIRouter, context: ServingContext) -> None:
    @router.get("/v1/pw/timeline")
    async def timeline(since: int = 0) -> Response:
        """A sample a second of the last quarter of an hour, from number `since` on."""
        samples = [asdict(sample) for sample in context.watch.timeline.since(since)]
        return JsonResponse({"interval_seconds": INTERVAL_SECONDS, "samples": samples})

    @router.get("/v1/pw/requests")
    async def requests() -> Response:
        """Requests that run or wait, oldest first: counts and times, no text."""
        each = [generation.describe() for generation in tuple(context.generations)]
        each.sort(key=lambda request: -request["age_seconds"])
        return JsonResponse({"count": len(each), "requests": each[:_REQUESTS_SHOWN]})
