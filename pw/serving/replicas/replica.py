"""One replica: the app of `pw serve` and its engine's process, inside a worker of Ray."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from ray import serve
from starlette.types import Message

from pw import logs
from pw.engine.process.wire import Load
from pw.errors import PwError
from pw.models.light import load_tokenizer_alone
from pw.serving.app import create_app
from pw.serving.context import ServingContext
from pw.serving.process.engine_process import EngineProcess
from pw.serving.process.remote import RemoteEngine
from pw.serving.replicas.calls import Answer, Call, answer, respond
from pw.serving.replicas.choice import Routing
from pw.serving.replicas.prefixes import Directory
from pw.serving.replicas.protocol import TAKEN
from pw.serving.replicas.settings import ReplicaArgs

logger = logging.getLogger("pw.serving.replicas")

KEYS_TOLD = 1024  # latest prefixes that routers hear of


class Replica:
    """Answers calls; Ray Serve starts, checks and ends it.

    Args:
        args: Of the application.
    """

    async def __init__(self, args: ReplicaArgs) -> None:  # type: ignore[misc] # Serve awaits it
        self._name = serve.get_replica_context().replica_id.unique_id
        self._args = args
        self._seen = Directory()
        logs.configure(logging.INFO, args.log_format)
        try:
            self._app = await asyncio.to_thread(load, args)
        except PwError as error:  # Ray shows the text alone
            hint = f" (hint: {error.hint})" if error.hint else ""
            raise RuntimeError(f"{error}{hint}") from None
        self._context: ServingContext = self._app.state.context
        self._life: AbstractAsyncContextManager[Any] = self._app.router.lifespan_context(self._app)
        await self._life.__aenter__()
        logger.info("replica %s serves %s", self._name, self._context.model_name)

    async def answer(self, call: Call, routing: Routing) -> AsyncIterator[Message]:
        """The messages of an answer, after one that the call is taken."""
        yield {"type": TAKEN, "replica": self._name}
        self._seen.record(routing.keys, self._name)
        try:
            async for message in respond(self._app, call):
                yield message
        except Exception:
            logger.exception("%s %s failed", call.method, call.path)

    async def ask(self, call: Call) -> tuple[str, Answer]:
        """The whole answer to a small question, with this replica's name."""
        return self._name, await answer(self._app, call)

    def check_health(self) -> None:
        """Say that this replica must be replaced.

        Raises:
            RuntimeError: With the reason, one of `/health/ready`'s.
        """
        reason = self._context.health.not_ready()
        if reason not in (None, "draining"):
            raise RuntimeError(f"replica {self._name} cannot serve: {reason}")

    def record_routing_stats(self) -> dict[str, Any]:
        """What routers everywhere should know: the prefixes that this replica has seen of late."""
        return {"keys": self._seen.latest(KEYS_TOLD)}

    async def __del__(self) -> None:
        """Finish what is open, then end the engine. Serve has taken us out of rotation before."""
        if not hasattr(self, "_life"):
            return
        gate = self._context.gate
        gate.draining = True
        deadline = time.monotonic() + self._args.shutdown_timeout
        while gate.open_sequences and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        logger.info("replica %s leaves with %d open sequences", self._name, gate.open_sequences)
        await self._life.__aexit__(None, None, None)


def load(args: ReplicaArgs) -> FastAPI:
    """Start an engine's process and make the app that serves it; takes as long as a model loads.

    Raises:
        PwError: It cannot be loaded, or a setting cannot be honoured.
    """
    path = Path(args.model)
    request = Load(path, args.engine_config(), logs.current(), args.queue_timeout)
    process = EngineProcess.launch(request)
    try:
        ready = process.wait_until_ready()
        config = args.serving_config(ready.info.model_name, ready.info.artifact_hash)
        engine = RemoteEngine(process, ready, stall_timeout=args.stall_timeout)
        return create_app(engine, load_tokenizer_alone(path), config)
    except BaseException:
        process.end(0.0)
        raise
