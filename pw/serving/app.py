"""Puts the app together: routes, middleware, error handlers, the engine's start and stop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from pw import __version__
from pw.serving.context import ServingConfig, ServingContext
from pw.serving.document import describe
from pw.serving.errors import CatchAll, install_error_handlers
from pw.serving.headers import HeaderLimit
from pw.serving.limits import BodyLimit
from pw.serving.middleware import HttpMetrics, RequestIdentity, RequireKey, TurnAway
from pw.serving.openai.endpoints import GENERATION_PATHS, generation_router
from pw.serving.openai.tokenization import tokenization_router
from pw.serving.operations.control import control_router
from pw.serving.operations.routes import operations_router
from pw.serving.process.engine_protocol import AsyncEngineProtocol, TokenizerProtocol


def create_app(
    engine: AsyncEngineProtocol,
    tokenizer: TokenizerProtocol,
    config: ServingConfig,
    *,
    allowed_origins: Sequence[str] = (),
) -> FastAPI:
    """An ASGI app that serves one engine; `app.state.context` is its `ServingContext`.

    Args:
        engine: Started when the app starts, stopped when it stops.
        tokenizer: The model's; used on one thread of the app's own.
        config: Names, limits, keys.
        allowed_origins: Origins whose pages may call the server from a browser; `*`: all.
    """
    context = ServingContext(engine, tokenizer, config)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        context.watch.start()
        yield
        context.gate.draining = True
        await context.watch.stop()
        context.encoder.close()
        await context.grammars.close()
        await engine.shutdown(0)

    app = FastAPI(title="PagedWeight", version=__version__, lifespan=lifespan)
    app.state.context = context
    app.openapi = partial(describe, app)  # type: ignore[method-assign]
    retry_after = config.limits.retry_after_seconds
    install_error_handlers(app, retry_after=retry_after, on_refusal=context.metrics.rejected)
    app.include_router(generation_router(context))
    app.include_router(operations_router(context))
    app.include_router(tokenization_router(context))
    app.include_router(control_router(context))
    # The last one added is the outermost.
    app.add_middleware(
        BodyLimit,
        max_bytes=config.limits.max_body_bytes,
        patience=config.limits.body_timeout,
    )
    app.add_middleware(
        TurnAway,
        gate=context.gate,
        paths=GENERATION_PATHS,
        retry_after=retry_after,
        on_refusal=context.metrics.rejected,
    )
    app.add_middleware(
        RequireKey,
        keys=config.api_keys,
        admin_keys=config.admin_keys,
        retry_after=retry_after,
    )
    app.add_middleware(HttpMetrics, metrics=context.metrics)
    app.add_middleware(HeaderLimit)
    app.add_middleware(CatchAll, retry_after=retry_after)
    app.add_middleware(RequestIdentity)
    if allowed_origins:  # a browser's question whether it may ask carries no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=allowed_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("x-request-id",),
        )
    return app
