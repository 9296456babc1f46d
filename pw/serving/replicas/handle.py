"""The replicas behind a handle of Ray Serve."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.types import Message

from pw.errors import RequestError
from pw.serving.replicas.calls import Answer, Call
from pw.serving.replicas.choice import Routing
from pw.serving.replicas.protocol import ReplicaLostError

logger = logging.getLogger("pw.serving.replicas")

ASK_SECONDS = 5.0  # for all replicas to answer a small question
SERVING_SECONDS = 1.0  # for which a count of replicas is good


class ServeReplicas:
    """`Replicas` over Ray Serve.

    Args:
        handle: Of the deployment.
        accept_timeout: Seconds in which a replica must take a call.
    """

    def __init__(self, handle: DeploymentHandle[Any], accept_timeout: float) -> None:
        self._handle, self._accept_timeout = handle, accept_timeout
        self._answers = handle.options(stream=True, method_name="answer")
        self._serving = (0, float("-inf"))  # how many, and when that was so

    async def send(self, call: Call, routing: Routing) -> AsyncIterator[Message]:
        """See `Replicas`."""
        messages: Any = self._answers.remote(call, routing=routing)
        finished = False
        try:
            async with asyncio.timeout(ASK_SECONDS if routing.only else self._accept_timeout):
                message = await anext(messages)
            while True:
                yield message
                message = await anext(messages)
        except StopAsyncIteration:
            finished = True
        except TimeoutError:
            raise self._not_taken(routing) from None
        except BackPressureError:
            raise RequestError("queue is full", code="server_overloaded", status=503) from None
        except (RayError, RayServeException) as error:
            raise ReplicaLostError(type(error).__name__) from error
        finally:
            if not finished:
                messages.cancel()

    def _not_taken(self, routing: Routing) -> RequestError:
        if routing.only is not None:
            return RequestError(
                f"no such replica, or it is full: `{routing.only}`",
                code="not_found",
                status=404,
                hint="/replicas lists them",
            )
        return RequestError(
            f"no replica took the request within {self._accept_timeout:g} s",
            code="server_overloaded",
            status=503,
        )

    async def ask_all(self, call: Call) -> dict[str, Answer]:
        """See `Replicas`."""
        asked = self._handle.broadcast("ask", call)
        try:
            answers = await asked.results_async(timeout_s=ASK_SECONDS, return_exceptions=True)
        except (TimeoutError, RayError, RayServeException) as error:
            raise RequestError(
                f"replicas do not answer: {type(error).__name__}",
                code="engine_unavailable",
                status=503,
            ) from error
        return dict(each for each in answers if not isinstance(each, BaseException))

    async def serving(self) -> int:
        """See `Replicas`: those that pass their health checks, as Serve's controller knows it."""
        count, since = self._serving
        if time.monotonic() - since > SERVING_SECONDS:
            count = await asyncio.to_thread(self._count)
            self._serving = (count, time.monotonic())
        return count

    def _count(self) -> int:
        application = serve.status().applications.get(self._handle.app_name)
        if application is None:
            return 0
        states = application.deployments[self._handle.deployment_name].replica_states
        return int(states.get("RUNNING", 0))
