"""Runs the app under uvicorn: listens, says how to reach it, drains on a signal."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import resource
import shlex
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from pw.serving.app import create_app
from pw.serving.context import ServingConfig, ServingContext
from pw.serving.headers import MAX_HEADER_BYTES
from pw.serving.http_protocol import HttpProtocol
from pw.serving.limits import shutting_down
from pw.serving.listen import Endpoint
from pw.serving.process.engine_protocol import AsyncEngineProtocol, TokenizerProtocol

logger = logging.getLogger("pw.serving")

# Longer than clients and proxies keep an idle connection (httpx 5 s, nginx and balancers 60 s): who
# closes first must be they, or their next request meets a connection that is being closed.
KEEP_ALIVE_SECONDS = 75
CLOSE_SECONDS = 2.0  # for the last bytes of answers, after all sequences have ended
CUT_OFF_SECONDS = 0.5  # ... after they were cut off
ENGINE_FAILED_SECONDS = 2.0  # for clients to be told


def _print(message: str) -> None:
    print(message, flush=True)


def serve(
    engine: AsyncEngineProtocol,
    tokenizer: TokenizerProtocol,
    config: ServingConfig,
    *,
    endpoint: Endpoint,
    allowed_origins: Sequence[str] = (),
    shutdown_timeout: float = 30.0,
    announce: Callable[[str], None] = _print,
) -> int:
    """Serve until a signal; the first one drains, a second one cuts off.

    Args:
        engine: Started and stopped here.
        tokenizer: The model's.
        config: Names, limits, keys.
        endpoint: Where to listen.
        allowed_origins: See `create_app`.
        shutdown_timeout: Seconds that running requests get to finish after the first signal.
        announce: Told once, when the endpoint answers, where and how to call.

    Returns:
        The exit code: 0 when every request was answered, 1 when some were cut off or the engine
        failed.

    Raises:
        ConfigError: The endpoint cannot be listened on.
    """
    _allow_many_connections()
    app = create_app(engine, tokenizer, config, allowed_origins=allowed_origins)
    context: ServingContext = app.state.context
    with endpoint.listening() as listener:
        message = how_to_call(
            endpoint.url(listener),
            context.model_name,
            chat=context.has_chat,
            keyed=bool(config.api_keys),
            uds=endpoint.uds,
        )
        server = DrainingServer(
            _uvicorn_config(app, endpoint), context, shutdown_timeout, lambda: announce(message)
        )
        with _long_lived():
            asyncio.run(server.serve(sockets=[listener]))
    if server.cut_off or server.engine_failed:
        return 1
    logger.info("stopped")
    return 0


def _allow_many_connections() -> None:
    """Take as many file descriptors as the system allows; the usual 1,024 are few connections."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@contextmanager
def _long_lived() -> Iterator[None]:
    """Let the garbage collector overlook what is there already and stays: half a million objects.

    It would go through them at each full collection, a pause that streams feel, and because there
    are so many it would come rarely: what connections leave behind would pile up in between.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _uvicorn_config(app: FastAPI, endpoint: Endpoint) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=HttpProtocol,
        ws="none",
        log_config=None,
        access_log=False,  # each generation has its own line
        server_header=False,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(2 * CLOSE_SECONDS),  # connections are dropped before
        root_path=endpoint.root_path,
        ssl_certfile=endpoint.ssl_certfile,
        ssl_keyfile=endpoint.ssl_keyfile,
    )


class DrainingServer(uvicorn.Server):
    """A uvicorn server that answers what it has accepted before it closes its port.

    After the first signal the port stays open, so that gateways see `/health/ready` turn 503 and
    new requests get a proper refusal; it closes when no sequence is open or the time is over.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        context: ServingContext,
        shutdown_timeout: float,
        on_started: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._context = context
        self._shutdown_timeout = shutdown_timeout
        self._on_started = on_started
        self._deadline = float("inf")
        self.cut_off = False  # whether a request was ended early
        self.engine_failed = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen, then say so."""
        await super().startup(sockets)
        if self.started:
            self._on_started()

    def handle_exit(self, sig: int, _frame: FrameType | None) -> None:
        """Drain at the first signal, end it at the second, die at the third.

        The signal is not raised again after the server has stopped: its exit code is ours.
        """
        if self._context.gate.draining:
            self._deadline = 0.0
            signal.signal(sig, signal.SIG_DFL)
            return
        self._context.gate.draining = True
        self._deadline = time.monotonic() + self._shutdown_timeout
        logger.info(
            "draining: %d open sequences, at most %.0f s; a second signal cuts off",
            self._context.gate.open_sequences,
            self._shutdown_timeout,
        )

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: leave when drained, or end what is open when the time is over.

        An engine that failed never comes back: its clients have been told, and leaving lets a
        supervisor start the server again.
        """
        if self._context.engine.failed and not self.engine_failed:
            self.engine_failed = True
            logger.error("the engine failed: leaving with exit code 1")
            self._context.gate.draining = True
            self._deadline = time.monotonic() + ENGINE_FAILED_SECONDS
        if self._context.gate.draining and not self.should_exit:
            if self._context.gate.open_sequences == 0:
                self.should_exit = True
            elif time.monotonic() > self._deadline:
                self.should_exit = self.cut_off = True
                for generation in tuple(self._context.generations):
                    generation.fail(shutting_down())
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the port; clients that do not take their last bytes in time are dropped."""
        seconds = CUT_OFF_SECONDS if self.cut_off else CLOSE_SECONDS
        dropping = asyncio.get_running_loop().call_later(seconds, self._drop_connections)
        await super().shutdown(sockets)
        dropping.cancel()

    def _drop_connections(self) -> None:
        for connection in tuple(self.server_state.connections):
            connection.transport.abort()


def how_to_call(url: str, model: str, *, chat: bool, keyed: bool, uds: Path | None = None) -> str:
    """The URL and ready-to-paste calls; keys are taken from `PW_API_KEY`, never printed."""
    field: tuple[str, object] = ("prompt", "The sky is")
    path, call, text = "completions", "completions", "text"
    if chat:
        field = ("messages", [{"role": "user", "content": "Why is the sky blue?"}])
        path, call, text = "chat/completions", "chat.completions", "message.content"
    argument = f"{field[0]}={json.dumps(field[1])}"
    data = shlex.quote(json.dumps({"model": model, field[0]: field[1], "max_tokens": 64}))
    header = ' -H "authorization: Bearer $PW_API_KEY"' if keyed else ""
    if uds is not None:
        socket_flag = f" --unix-socket {shlex.quote(str(uds))}"
        return f"""\
PagedWeight serves {model} on {uds}

  curl{socket_flag} {url}/v1/{path} -H 'content-type: application/json'{header} -d {data}
"""
    imports, key = ("import os\n  ", 'os.environ["PW_API_KEY"]') if keyed else ("", '"none"')
    return f"""\
PagedWeight serves {model} on {url}

  curl {url}/v1/{path} -H 'content-type: application/json'{header} -d {data}

  {imports}from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key={key})
  answer = client.{call}.create(model={json.dumps(model)}, {argument}, max_tokens=64)
  print(answer.choices[0].{text})
"""
