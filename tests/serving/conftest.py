"""A real uvicorn server on a free port, around a fake engine, with real clients."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from pw.serving.app import create_app
from pw.serving.context import ServingConfig, ServingContext
from pw.serving.headers import MAX_HEADER_BYTES
from pw.serving.http_protocol import HttpProtocol
from pw.serving.server import KEEP_ALIVE_SECONDS
from support.patience import PATIENCE
from tests.serving.browser import driver  # noqa: F401 - a fixture
from tests.serving.fakes import FakeEngine, WordTokenizer


@dataclass
class Served:
    """One running server and its clients."""

    url: str
    engine: FakeEngine
    context: ServingContext
    paths: set[str]
    http: httpx.Client
    openai: openai.OpenAI

    def async_openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def metrics(self) -> dict[str, float]:
        lines = self.http.get("/metrics").text.splitlines()
        samples = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in samples}


@contextmanager
def serving(
    engine: FakeEngine | None = None,
    tokenizer: WordTokenizer | None = None,
    config: ServingConfig | None = None,
    api_key: str = "none",
) -> Iterator[Served]:
    engine = engine or FakeEngine()
    config = config or ServingConfig(("fake", "alias"), artifact_hash="0123456789abcdef")
    app = create_app(engine, tokenizer or WordTokenizer(), config)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            port=0,
            http=HttpProtocol,
            log_config=None,
            ws="none",
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        )
    )
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        thread.join(0.005)
    paths = set(app.openapi()["paths"]) | {"/docs", "/openapi.json"}
    port = server.servers[0].sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    try:
        with (
            httpx.Client(base_url=url, timeout=PATIENCE) as http,
            openai.OpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0) as client,
        ):
            yield Served(url, engine, app.state.context, paths, http, client)
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
    assert not thread.is_alive()
    assert getattr(engine, "stopped", True)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """A server that most tests of a file share; each must leave it as it was."""
    with serving() as running:
        yield running


def wait_for(condition: Callable[[], object]) -> None:
    """Until it holds."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


@contextmanager
def abandoned(url: str, path: str, fields: dict[str, Any]) -> Iterator[None]:
    """A request that its client leaves at the end of the block."""
    address = httpx.URL(url)
    with socket.create_connection((address.host, address.port), timeout=PATIENCE) as client:
        client.sendall(request_bytes(path, fields))
        yield


def request_bytes(path: str, fields: dict[str, Any]) -> bytes:
    """A whole POST."""
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


@pytest.fixture
def start() -> Callable[..., object]:
    """`with start(engine, ...) as served` for tests that need a server of their own."""
    return serving
