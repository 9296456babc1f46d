"""Routes of our own: where each block's bits stand."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from pw.serving.context import ServingContext
from pw.serving.wire import JsonResponse, JsonRoute


def control_router(context: ServingContext) -> APIRouter:
    """What the planner did."""
    router = APIRouter(prefix="/v1/pw", route_class=JsonRoute)

    @router.get("/precision")
    async def precision() -> Response:
        """Bits by layer and by block, and the plans that led there."""
        snapshot = context.engine.status()
        names = ("policy", "mean_bits", "layer_bits", "blocks_by_bits", "plan_history")
        return JsonResponse({name: getattr(snapshot, name) for name in names})

    return router
