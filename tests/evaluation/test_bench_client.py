"""The load generator against servers that do right and servers that do wrong."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from pw.errors import PwError
from pw.evaluation.bench import client
from pw.evaluation.bench.client import ENDPOINTS, Pace, Target, run
from pw.evaluation.bench.metrics import Timing
from pw.evaluation.bench.workload import Request
from support.patience import run_in_virtual_time

TARGET = Target("http://server", ignore_eos=True, api_key="k")


class Server:
    """An OpenAI server of a few lines: `tokens` chunks, each after `gap` seconds."""

    def __init__(self, *, tokens: int = 3, gap: float = 0.01, usage: bool = True) -> None:
        self.tokens, self.gap, self.usage = tokens, gap, usage
        self.bodies: list[dict[str, Any]] = []
        self.open = self.most_open = 0
        self.moments: list[float] = []
        self.answer: Callable[[httpx.Request], httpx.Response] | None = None
        self.ending = "data: [DONE]\n\n"

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == "Bearer k"
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "served"}]})
        self.bodies.append(json.loads(request.content))
        self.moments.append(asyncio.get_running_loop().time())
        if self.answer is not None and len(self.bodies) > 1:  # the first makes it ready
            return self.answer(request)
        return httpx.Response(200, content=self.stream(request.url.path == ENDPOINTS[1]))

    async def stream(self, chat: bool) -> AsyncIterator[bytes]:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        yield b": ping\n\n"
        if chat:
            yield b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
        for _ in range(self.tokens):
            await asyncio.sleep(self.gap)
            choice: dict[str, Any] = {"delta": {"content": "x"}} if chat else {"text": "x"}
            yield b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
        if self.usage:
            usage = {
                "prompt_tokens": 5, "completion_tokens": 2 * self.tokens,
                "prompt_tokens_details": {"cached_tokens": 4},
            }  # fmt: skip
            yield b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
        yield self.ending.encode()
        self.open -= 1


class LoopClock:
    """In place of the module `time`: computing takes next to none of it, see `support.patience`."""

    @staticmethod
    def perf_counter() -> float:
        return asyncio.get_running_loop().time()


@pytest.fixture(autouse=True)
def _virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "time", LoopClock)


def ask(server: Server, count: int = 1, target: Target = TARGET, **pace: Any) -> list[Timing]:
    requests = [Request([1, 2, 3], 9)] * count
    transport = httpx.MockTransport(server)
    timings, ran = run_in_virtual_time(run(target, requests, Pace(**pace), transport))
    assert ran["model"] == (target.model or "served")
    return timings


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_moments_and_counts_are_the_clients_and_the_servers(
    endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pw")
    server = Server()
    (timing,) = ask(server, target=Target("http://server", endpoint, api_key="k"))
    assert timing.error is None
    assert (timing.input_tokens, timing.output_tokens, timing.cached_tokens) == (5, 6, 4)
    assert timing.milliseconds("ttft") == pytest.approx([10], abs=1)  # a role alone is no token
    assert timing.milliseconds("itl") == pytest.approx([10, 10], abs=1)
    body = server.bodies[-1]
    assert body["stream"] is True
    assert body["model"] == "served"
    if endpoint == ENDPOINTS[0]:
        assert (body["prompt"], body["max_tokens"]) == ([1, 2, 3], 9)
    else:
        assert body["messages"] == [{"role": "user", "content": "1 2 3"}]
        assert body["max_completion_tokens"] == 9
    told = "token ids of prompts are sent as numbers in words" in caplog.text
    assert told is (endpoint == ENDPOINTS[1])


def test_a_server_without_usage_is_counted_by_its_chunks() -> None:
    (timing,) = ask(Server(usage=False))
    assert timing.error is None
    assert timing.output_tokens == 3


def test_no_more_requests_are_open_than_asked_for() -> None:
    server = Server()
    assert all(t.error is None for t in ask(server, 6, max_concurrency=2))
    assert server.most_open == 2
    free = Server()
    ask(free, 6)
    assert free.most_open == 6


def test_requests_keep_their_moments() -> None:
    server = Server(tokens=1, gap=0.0)
    ask(server, 5, rate=50.0, burstiness=1000.0)
    gaps = [b - a for a, b in zip(server.moments[1:-1], server.moments[2:], strict=True)]
    assert all(0.017 < gap < 0.023 for gap in gaps)  # 50 a second, next to even


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (lambda _: httpx.Response(503, json={"error": {"message": "full"}}), "HTTP 503: full"),
        (lambda _: httpx.Response(500, text="oops"), "HTTP 500: oops"),
        (lambda _: httpx.Response(200, text='data: {"error": {"message": "bad"}}\n\n'),
         "in the stream: bad"),
        (lambda _: httpx.Response(200, text='data: {"choices": [{"text": "x"}]}\n\n'),
         "ended without"),
        (lambda _: httpx.Response(200, text="data: [DONE]\n\n"), "had no token"),
        (lambda _: httpx.Response(200, text="data: {nonsense\n\n"), "JSONDecodeError"),
    ],
)  # fmt: skip
def test_no_failure_passes_for_an_answer(
    answer: Callable[[httpx.Request], httpx.Response], error: str
) -> None:
    server = Server()
    server.answer = answer
    timings = ask(server, 2)
    assert all(timing.error is not None and error in timing.error for timing in timings)


def test_a_server_that_is_not_there_is_one_line() -> None:
    def refuse(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("all connection attempts failed")

    with pytest.raises(PwError, match=r"no model at http://server.*all connection attempts"):
        run_in_virtual_time(run(TARGET, [Request("x", 1)], Pace(), httpx.MockTransport(refuse)))


@pytest.mark.parametrize(
    ("status", "message", "error", "hint"),
    [
        (401, "API key is missing", "the server needs an API key: http://server", "--api-key"),
        (400, "maximum context length is 9", "maximum context length", "--random-input-len"),
        (500, "broken", "first answer failed: HTTP 500: broken", ""),
    ],
)
def test_what_a_server_refuses_has_a_hint(status: int, message: str, error: str, hint: str) -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        if status != 401 and request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        return httpx.Response(status, json={"error": {"message": message}})

    target = replace(TARGET, model=None)
    with pytest.raises(PwError, match=error) as caught:
        run_in_virtual_time(run(target, [Request("x", 1)], Pace(), httpx.MockTransport(refuse)))
    assert hint in caught.value.hint
    assert bool(hint) == bool(caught.value.hint)
