"""Two processes under HTTP: the engine is killed or stopped, the server told to go or killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.patience import PATIENCE, allowed
from support.remote import alive
from support.served import ServerProcess, Stream, server_process
from support.step_engine import StepEngine

Launch = Callable[..., ServerProcess]


@pytest.fixture
def launch() -> Iterator[Launch]:
    """`launch(step_seconds, **options)`, see `serve_remote.py`; no engine outlives its server."""
    with ExitStack() as running:
        pids: list[int] = []

        def start(step_seconds: float, **options: Any) -> ServerProcess:
            arguments = (str(step_seconds), json.dumps(options))
            server = running.enter_context(
                server_process("-m", "tests.serving.serve_remote", *arguments)
            )
            pids.extend(server.children())
            return server

        yield start
    assert pids
    wait_until(lambda: not any(map(alive, pids)))


def wait_until(true: Callable[[], bool], seconds: float = PATIENCE) -> float:
    begin = time.monotonic()
    while not true():
        assert time.monotonic() - begin < seconds, "waited in vain"
        time.sleep(0.01)
    return time.monotonic() - begin


def ready(url: str) -> int:
    return httpx.get(f"{url}/health/ready", timeout=PATIENCE).status_code


def status(url: str) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.get(f"{url}/v1/pw/status", timeout=PATIENCE).json()
    return answer


def complete(url: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json={"prompt": "1"} | body, timeout=PATIENCE)


def test_a_killed_engine_is_told_to_everyone_and_ends_the_server(launch: Launch) -> None:
    server = launch(0.02)
    [engine] = server.children()
    streams = [Stream(server.url, max_tokens=4000) for _ in range(3)]
    killed = time.monotonic()
    os.kill(engine, signal.SIGKILL)
    for stream in streams:
        [error] = stream.join().errors
        assert "the engine failed" in str(error)
    assert time.monotonic() - killed < allowed(2)
    code, _, log = server.end()
    assert time.monotonic() - killed < allowed(5)
    assert code == 1
    assert "the engine process ended: SIGKILL" in log
    assert "leaving with exit code 1" in log
    assert "Traceback" not in log


def test_new_requests_are_refused_while_the_server_leaves(launch: Launch, tmp_path: Path) -> None:
    """A client that reads nothing keeps the server until it has gone."""
    uds = str(tmp_path / "socket")
    server = launch(0.001, endpoint={"uds": uds}, failed_seconds=PATIENCE)
    [engine] = server.children()
    with over_uds(uds) as http:
        with lazy_reader(uds, n=16):
            wait_until(lambda: step_of(http) > FULL)
            os.kill(engine, signal.SIGKILL)
            wait_until(lambda: http.get("/health/ready").status_code == 503)
            refused = http.post("/v1/completions", json={"prompt": "1"})
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "engine_unavailable"
            assert refused.headers["retry-after"]
            assert http.get("/health/live").status_code == 200
            assert step_of(http) > FULL
            assert http.get("/metrics").status_code == 200
            assert server.process.poll() is None
        assert server.process.wait(PATIENCE) == 1
    assert "Traceback" not in server.end()[2]
    assert not Path(uds).exists()


def test_who_reads_nothing_keeps_the_server_for_seconds_only(
    launch: Launch, tmp_path: Path
) -> None:
    uds = str(tmp_path / "socket")
    server = launch(0.001, endpoint={"uds": uds}, failed_seconds=0.5)
    [engine] = server.children()
    with over_uds(uds) as http, lazy_reader(uds, n=16):
        wait_until(lambda: step_of(http) > FULL)
        os.kill(engine, signal.SIGKILL)
        assert server.process.wait(PATIENCE) == 1


FULL = 400  # steps of 16 sequences: megabytes, where a socket holds 200 kB


def over_uds(uds: str) -> httpx.Client:
    return httpx.Client(
        base_url="http://x", transport=httpx.HTTPTransport(uds=uds), timeout=PATIENCE
    )


def step_of(http: httpx.Client) -> int:
    return int(http.get("/v1/pw/status").json()["step"])


@contextmanager
def lazy_reader(uds: str, **body: Any) -> Iterator[None]:
    """A client that asks for an endless stream and reads none of it."""
    data = json.dumps({"prompt": "1", "max_tokens": 4000, "stream": True} | body).encode()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(uds)
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        client.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        yield


def test_a_stopped_engine_is_a_stall_until_it_goes_on(launch: Launch) -> None:
    server = launch(0.02, stall_timeout=3.0)
    [engine] = server.children()
    stream = Stream(server.url, max_tokens=4000)
    os.kill(engine, signal.SIGSTOP)
    detected = wait_until(lambda: ready(server.url) == 503)
    assert detected < allowed(4.5)
    [error] = stream.join().errors
    assert "stalled" in str(error)
    refused = complete(server.url)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
    os.kill(engine, signal.SIGCONT)
    assert wait_until(lambda: ready(server.url) == 200) < allowed(3)
    assert complete(server.url, max_tokens=3).json()["choices"][0]["text"] == "1 2 3 "
    server.process.send_signal(signal.SIGTERM)
    code, _, log = server.end()
    assert code == 0
    assert "the engine is stalled" in log
    assert "the engine goes on" in log


def test_sixty_four_streams_are_drained(launch: Launch) -> None:
    """A terminal or a supervisor may signal both processes; the engine leaves it to the server."""
    server = launch(0.01)
    [engine] = server.children()
    crowd = {"prompt": [StepEngine.CROWD], "max_tokens": 100}  # nobody ends before all have come
    many = [complete_later(server.url, n=8, **crowd) for _ in range(7)]
    streams = [Stream(server.url, **crowd) for _ in range(8)]
    wait_until(lambda: status(server.url)["open_sequences"] == 64)
    os.kill(engine, signal.SIGSTOP)  # so that the server is seen to drain
    server.process.send_signal(signal.SIGTERM)
    os.kill(engine, signal.SIGTERM)
    wait_until(lambda: ready(server.url) == 503)
    assert complete(server.url).json()["error"]["message"] == "server is shutting down"
    os.kill(engine, signal.SIGCONT)
    for stream in streams:
        assert stream.join().errors == []
        assert "".join(stream.texts).split() == [str(n + 1) for n in range(100)]
        assert stream.finish_reason == "length"
    for answer in many:
        choices = answer()["choices"]
        assert len(choices) == 8
        assert {choice["finish_reason"] for choice in choices} == {"length"}
    code, _, log = server.end()
    assert code == 0
    assert "Traceback" not in log


def complete_later(url: str, **body: Any) -> Callable[[], Any]:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(complete, url, **body)

    def answer() -> Any:
        pool.shutdown()
        return future.result().json()

    return answer


@pytest.mark.parametrize("stopped", [False, True])
def test_a_second_signal_ends_the_server_in_two_seconds(launch: Launch, stopped: bool) -> None:
    server = launch(0.02)
    [engine] = server.children()
    streams = [Stream(server.url, max_tokens=4000) for _ in range(4)]
    if stopped:  # even so
        os.kill(engine, signal.SIGSTOP)
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: ready(server.url) == 503)
    assert server.process.poll() is None
    begin = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(PATIENCE) == 1
    assert time.monotonic() - begin < allowed(2)
    for stream in streams:
        [error] = stream.join().errors
        assert "server is shutting down" in str(error)
    assert not alive(engine)
    assert "Traceback" not in server.end()[2]


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGABRT])
def test_a_server_that_is_killed_leaves_no_engine(launch: Launch, signal_number: int) -> None:
    server = launch(0.02)
    [engine] = server.children()
    stream = Stream(server.url, max_tokens=4000)
    server.process.send_signal(signal_number)
    assert wait_until(lambda: not alive(engine)) < allowed(2)
    assert stream.join().errors


def test_a_request_may_take_so_long(launch: Launch) -> None:
    server = launch(0.02, limits={"request_timeout": 3.0})
    late = complete_later(server.url, max_tokens=4000)
    stream = Stream(server.url, max_tokens=4000).join()
    assert 1 <= len(stream.texts) < 200
    assert "longer than 3 s" in str(stream.errors[0])
    error = late()["error"]
    assert error["code"] == "timeout"
    assert "longer than 3 s" in error["message"]
    wait_until(lambda: status(server.url)["running"] == 0)
    assert complete(server.url, max_tokens=2).is_success


def test_a_request_may_wait_so_long(launch: Launch) -> None:
    server = launch(0.02, queue_timeout=2.0)
    busy = [Stream(server.url, n=16, max_tokens=4000) for _ in range(4)]
    wait_until(lambda: status(server.url)["running"] == 64)
    waited = complete(server.url, max_tokens=1)
    assert waited.status_code == 504
    assert waited.json()["error"]["code"] == "timeout"
    assert "waited for 2 s" in waited.json()["error"]["message"]
    assert not any(stream.errors for stream in busy)  # they have begun
    for _ in range(2):
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: ready_or_gone(server.url) != 200)
    for stream in busy:
        assert stream.join().errors


def ready_or_gone(url: str) -> int:
    try:
        return ready(url)
    except httpx.TransportError:
        return 0
