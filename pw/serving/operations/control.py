"""Routes of our own: where each block's bits stand, and another policy while it runs."""

from __future__ import annotations

import logging
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from pw.serving.context import ServingContext
from pw.serving.middleware import check_admin
from pw.serving.wire import JsonResponse, JsonRoute

logger = logging.getLogger("pw.serving")


class PolicyRequest(BaseModel):
    """Body of `POST /v1/pw/policy`."""

    model_config = ConfigDict(extra="forbid")

    policy: Annotated[str, Field(min_length=1, max_length=4096)]  # as --precision-policy


def control_router(context: ServingContext) -> APIRouter:
    """What the planner did, and what it shall do."""
    router = APIRouter(prefix="/v1/pw", route_class=JsonRoute)

    @router.get("/precision")
    async def precision() -> Response:
        """Bits and routing mass of every block, and the plans that led there."""
        snapshot = context.engine.status()
        names = ("policy", "mean_bits", "layer_bits", "blocks_by_bits", "plan_history")
        answer = {name: getattr(snapshot, name) for name in names}
        return JsonResponse(answer | await context.engine.precision_map())

    @router.post("/policy")
    async def policy(body: PolicyRequest, request: Request) -> Response:
        """Take another precision policy; needs an admin key. Running requests go on."""
        check_admin(request.scope, open_to_admins=bool(context.config.admin_keys))
        before = context.engine.status().policy
        await context.engine.set_policy(body.policy)
        logger.warning("precision policy changed by a client: %s -> %s", before, body.policy)
        return JsonResponse({"policy": body.policy, "before": before})

    return router
