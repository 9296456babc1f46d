"""Clients that vanish, at every phase and by the hundred: their pages come back, nobody notices.

The engine is real and runs in its own process behind the real wire; the counts of
docs/reliability.md run by `make reliability`.
"""

from __future__ import annotations

import json
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from pw.engine import AsyncEngine, Engine
from pw.engine.request import RequestOutput
from support.engines import make_artifact, open_engine, random_prompt
from support.patience import PATIENCE
from tests.serving.conftest import Served, wait_for

RESET = struct.pack("ii", 1, 0)  # SO_LINGER that makes `close` send RST


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("leaving")
    return make_artifact("qwen2_moe", folder, num_attention_heads=2)[1]


@pytest.fixture
def served(artifact: Path, start: Callable[..., Any]) -> Iterator[Served]:
    """Two sequences run, the others wait; prompts take several steps."""
    engine = open_engine(artifact, "static:4", max_num_seqs=2, max_num_batched_tokens=32)
    with start(AsyncEngine(engine), engine.tokenizer) as running:
        yield running
        settle(running)
    engine.check_integrity()
    assert engine.status().pages_kv == 0


def settle(served: Served, seconds: float = PATIENCE) -> None:
    """Wait until the server holds nothing of anybody."""
    deadline = time.monotonic() + seconds
    while True:
        status = served.http.get("/v1/pw/status").json()
        held = status["open_sequences"], status["running"], status["waiting"], status["pages_kv"]
        if held == (0, 0, 0, 0):
            return
        assert time.monotonic() < deadline, held
        time.sleep(0.02)


def connect(served: Served, **body: Any) -> socket.socket:
    """A request that is sent and not yet answered."""
    url = httpx.URL(served.url)
    client = socket.create_connection((url.host, url.port), timeout=PATIENCE)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    data = json.dumps({"prompt": random_prompt(200, 1), "stream": True} | body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    client.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    return client


def read_until(client: socket.socket, mark: bytes) -> None:
    """Byte by byte: what comes after the mark is for the next call."""
    seen = b""
    while not seen.endswith(mark):
        got = client.recv(1)
        assert got, seen[-500:]
        seen += got


def in_prefill(client: socket.socket, chance: random.Random) -> None:
    time.sleep(chance.uniform(0, 0.05))


def in_decode(client: socket.socket, chance: random.Random) -> None:
    for _ in range(chance.randint(1, 5)):
        read_until(client, b"data: ")


def before_done(client: socket.socket, chance: random.Random) -> None:
    read_until(client, b'"finish_reason":"length"')


PHASES = [in_prefill, in_decode, before_done]


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.__name__)
@pytest.mark.parametrize("count", [5, pytest.param(200, marks=pytest.mark.figures)])
def test_a_client_that_leaves_gives_its_pages_back(
    served: Served, phase: Callable[[socket.socket, random.Random], None], count: int
) -> None:
    chance = random.Random(count)
    for _ in range(count):
        tokens = 4 if phase is before_done else 40
        client = connect(served, max_tokens=tokens, ignore_eos=True, n=chance.choice([1, 2, 4]))
        phase(client, chance)
        client.close()
    settle(served)
    assert served.openai.completions.create(model="fake", prompt="a", max_tokens=2).choices


@pytest.mark.parametrize("count", [10, pytest.param(200, marks=pytest.mark.figures)])
def test_clients_that_leave_the_queue(served: Served, count: int) -> None:
    holders = [connect(served, prompt=[5], max_tokens=250, ignore_eos=True) for _ in range(2)]
    for holder in holders:
        read_until(holder, b"data: ")
    gate = served.context.gate
    for wave in range(0, count, 50):
        with paused(served.engine.engine):
            before = gate.open_sequences
            waiting = [connect(served, max_tokens=40) for _ in range(min(50, count - wave))]
            wait_for(lambda: gate.open_sequences == before + len(waiting))  # noqa: B023
            for client in waiting:
                client.close()
            wait_for(lambda: gate.open_sequences == before)  # noqa: B023
    for holder in holders:
        holder.close()
    settle(served)


@contextmanager
def paused(engine: Engine) -> Iterator[None]:
    """An engine that makes no steps, so that whoever comes has to wait."""
    step = engine.step

    def rest() -> list[RequestOutput]:
        time.sleep(0.005)
        return []

    engine.step = rest  # type: ignore[method-assign]
    try:
        yield
    finally:
        engine.step = step  # type: ignore[method-assign]


def test_a_storm_of_resets(served: Served) -> None:
    """Connections that say nothing, half a head, a body cut short, or a whole request, and RST.

    At full rate, from a process of its own: `make soak`.
    """
    count, url = 200, httpx.URL(served.url)
    whole = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    body = json.dumps({"prompt": [5, 6, 7], "max_tokens": 50, "stream": True}).encode()
    request = whole + f"content-length: {len(body)}\r\n\r\n".encode() + body
    chance = random.Random(1)
    for sent in range(count):
        with socket.create_connection((url.host, url.port), timeout=PATIENCE) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            client.sendall(request[: chance.choice([0, 20, len(whole) + 30, len(request)])])
        if sent % 50 == 0:  # somebody wants to know
            assert served.http.get("/health/ready").status_code == 200
    settle(served)
    assert served.openai.completions.create(model="fake", prompt="a", max_tokens=2).choices
