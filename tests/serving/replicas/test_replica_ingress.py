"""The ingress in front of fake replicas: what is tried again, passed on, refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from starlette.types import Message

from pw.errors import RequestError
from pw.serving.replicas.calls import Answer, Call
from pw.serving.replicas.choice import Routing
from pw.serving.replicas.ingress import IngressSettings, create_ingress
from pw.serving.replicas.overview import merged
from pw.serving.replicas.protocol import TAKEN, ReplicaLostError

JSON, EVENTS = b"application/json", b"text/event-stream; charset=utf-8"
Script = list[Any]  # messages; an exception is raised, an event waited for


def head(status: int = 200, kind: bytes = JSON) -> Message:
    headers = [(b"content-type", kind), (b"x-request-id", b"of the replica")]
    return {"type": "http.response.start", "status": status, "headers": headers}


def body(text: str, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": text.encode(), "more_body": more}


def error(code: str) -> str:
    return json.dumps({"error": {"message": "no", "type": "server_error", "code": code}})


GOOD: Script = [head(), body('{"fine": true}')]
LOST = ReplicaLostError("killed")


class FakeReplicas:
    """Answers by scripts, one a request, the last of them for ever."""

    def __init__(self, *scripts: Script) -> None:
        self.scripts = list(scripts)
        self.calls: list[tuple[Call, Routing]] = []
        self.closed = 0
        self.alive = 2
        self.all: dict[str, Answer] = {}

    async def send(self, call: Call, routing: Routing) -> AsyncIterator[Message]:
        self.calls.append((call, routing))
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        name = routing.only or f"replica-{len(self.calls)}"
        try:
            yield {"type": TAKEN, "replica": name}
            for step in script:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, asyncio.Event):
                    await step.wait()
                else:
                    yield step
        finally:
            self.closed += 1

    async def ask_all(self, call: Call) -> dict[str, Answer]:
        self.calls.append((call, Routing()))
        return self.all

    async def serving(self) -> int:
        return self.alive


Ask = Callable[..., httpx.Response]


@pytest.fixture
def ask() -> Callable[..., Ask]:
    """`ask(replicas)(method, path, ...)`: one request through an ingress."""

    def behind(replicas: FakeReplicas, **settings: Any) -> Ask:
        app = create_ingress(replicas, IngressSettings(**settings))

        def request(method: str, path: str, **options: Any) -> httpx.Response:
            async def once() -> httpx.Response:
                transport = httpx.ASGITransport(app=app)
                async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
                    return await http.request(method, path, **options)

            return asyncio.run(once())

        return request

    return behind


def post(ask: Any, replicas: FakeReplicas, **settings: Any) -> httpx.Response:
    answer: httpx.Response = ask(replicas, **settings)(
        "POST", "/v1/completions", json={"model": "m", "prompt": "p" * 400}
    )
    return answer


@pytest.mark.parametrize(
    "bad",
    [
        [LOST],
        [head(), LOST],  # the head alone is nothing that a client has seen
        [head(200, EVENTS), LOST],
        [head(503), body(error("engine_unavailable"))],
        [head(503), body(error("server_overloaded"))],
        [head(500), body(error("engine_failed"))],
        [head(500), body(error("engine_stopped"))],
        [head()],  # broke off without a word
    ],
)
def test_a_replica_that_cannot_answer_costs_the_client_nothing(ask: Any, bad: Script) -> None:
    replicas = FakeReplicas(bad, GOOD)
    answer = post(ask, replicas)
    assert (answer.status_code, answer.json()) == (200, {"fine": True})
    assert answer.headers["x-pw-replica"] == "replica-2"
    first, second = (routing for _, routing in replicas.calls)
    assert (first.avoid, second.avoid) == ((), ("replica-1",))
    assert first.keys == second.keys
    assert len(first.keys) == 3
    assert replicas.closed == 2


@pytest.mark.parametrize(
    ("status", "code"), [(500, "server_error"), (400, "invalid_value"), (504, "timeout"),
                         (429, "slow_down"), (404, "model_not_found")],
)  # fmt: skip
def test_what_another_replica_would_say_as_well_is_passed_on(
    ask: Any, status: int, code: str
) -> None:
    replicas = FakeReplicas([head(status), body(error(code))])
    answer = post(ask, replicas)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert len(replicas.calls) == 1


def test_after_the_last_attempt_the_replica_has_its_say(ask: Any) -> None:
    replicas = FakeReplicas([head(503), body(error("server_overloaded"))])
    answer = post(ask, replicas, attempts=2)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_overloaded")
    assert len(replicas.calls) == 2


def test_with_all_replicas_lost_clients_are_told_to_come_back(ask: Any) -> None:
    replicas = FakeReplicas([LOST])
    answer = post(ask, replicas)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["code"] == "engine_unavailable"
    assert len(replicas.calls) == 3
    assert replicas.calls[-1][1].avoid == ("replica-1", "replica-2")


def test_a_refusal_of_all_replicas_is_final(ask: Any) -> None:
    replicas = FakeReplicas([RequestError("queue is full", code="server_overloaded", status=503)])
    answer = post(ask, replicas)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert len(replicas.calls) == 1


def test_a_begun_stream_ends_with_an_error_event(ask: Any) -> None:
    replicas = FakeReplicas([head(200, EVENTS), body("data: {}\n\n", more=True), LOST])
    answer = post(ask, replicas)
    events = answer.text.strip().split("\n\n")
    assert (answer.status_code, events[0], len(events)) == (200, "data: {}", 2)
    assert json.loads(events[1].removeprefix("data: "))["error"]["code"] == "engine_failed"
    assert len(replicas.calls) == 1


def test_a_whole_answer_is_complete_even_if_its_replica_then_dies(ask: Any) -> None:
    replicas = FakeReplicas([*GOOD, LOST])
    assert post(ask, replicas).json() == {"fine": True}


def test_other_answers_are_cut_off(ask: Any) -> None:
    with pytest.raises(ReplicaLostError):
        post(ask, FakeReplicas([head(), body("{", more=True), LOST]))


def test_a_client_that_leaves_closes_the_call() -> None:
    async def whole() -> None:
        replicas = FakeReplicas([head(200, EVENTS), body("data: 1\n\n", more=True),
                                 asyncio.Event()])  # fmt: skip
        app = create_ingress(replicas, IngressSettings())
        left, sent = asyncio.Event(), []
        incoming = [{"type": "http.request", "body": b"{}", "more_body": False}]

        async def receive() -> Message:
            if incoming:
                return incoming.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message["type"])
            if len(sent) == 2:
                left.set()

        scope = Call("POST", "/v1/completions").scope()
        await asyncio.wait_for(app(scope, receive, send), 10)
        assert sent == ["http.response.start", "http.response.body"]
        assert replicas.closed == 1

    asyncio.run(whole())


def test_bodies_and_keys_are_judged_here(ask: Any) -> None:
    replicas = FakeReplicas(GOOD)
    large = ask(replicas, max_body_bytes=10)("POST", "/v1/completions", content=b"x" * 11)
    assert (large.status_code, large.json()["error"]["code"]) == (413, "request_too_large")
    request = ask(replicas, api_keys=("secret",))
    assert request("GET", "/v1/models").status_code == 401
    assert request("GET", "/health/live").status_code == 200
    many = [(f"x-{number}", "1") for number in range(120)]
    assert ask(replicas)("GET", "/v1/models", headers=many).status_code == 431
    large = ask(replicas)("GET", "/v1/models", headers={"x-large": "a" * 70_000})
    assert (large.status_code, large.json()["error"]["code"]) == (431, "headers_too_large")
    assert replicas.calls == []
    good = request("GET", "/v1/models", headers={"authorization": "Bearer secret"})
    assert good.status_code == 200
    assert "x-request-id" not in good.headers  # Serve's proxy adds it


def test_a_request_for_one_replica_goes_there_once(ask: Any) -> None:
    replicas = FakeReplicas([head(503), body(error("engine_unavailable"))])
    answer = ask(replicas)("GET", "/replicas/abc/v1/pw/status?x=1", headers={"x-request-id": "me"})
    assert answer.status_code == 503
    ((call, routing),) = replicas.calls
    assert (call.path, call.query_string, routing.only) == ("/v1/pw/status", b"x=1", "abc")
    assert [value for name, value in call.headers if name == b"x-request-id"] == [b"me"]


def test_health_asks_how_many_serve(ask: Any) -> None:
    replicas = FakeReplicas(GOOD)
    assert ask(replicas)("GET", "/health/ready").status_code == 200
    replicas.alive = 0
    answer = ask(replicas)("GET", "/health")
    assert (answer.status_code, answer.json()) == (503, {"reason": "no_replica"})
    assert ask(replicas)("GET", "/health/live").status_code == 200
    assert replicas.calls == []


@pytest.mark.parametrize("path", ["/", "/dashboard/main.js", "/v1/pw/status", "/load"])
def test_what_one_server_says_is_not_asked_of_several(ask: Any, path: str) -> None:
    answer = ask(FakeReplicas(GOOD))("GET", path)
    assert answer.status_code == 404
    assert f"/replicas/<id>{path}" in answer.json()["error"]["message"]


def test_the_list_and_the_metrics_are_of_all(ask: Any) -> None:
    replicas = FakeReplicas(GOOD)
    status = {"ready": True, "not_ready_reason": None, "policy": "adaptive", "mean_bits": 6.0,
              "running": 1, "waiting": 0, "bytes": {}}  # fmt: skip
    replicas.all = {"b": Answer(200, [], json.dumps(status).encode()), "a": Answer(500)}
    (listed,) = ask(replicas)("GET", "/replicas").json()["replicas"]
    assert (listed["id"], listed["running"], "bytes" in listed) == ("b", 1, False)
    assert replicas.calls[0][0].path == "/v1/pw/status"
    replicas.all = {"a": Answer(200, [], b"# HELP x y\n# TYPE x gauge\nx 1.0\n")}
    assert 'x{replica="a"} 1.0' in ask(replicas)("GET", "/metrics").text


def test_metrics_of_a_family_stand_together() -> None:
    one = '# HELP up u\n# TYPE up gauge\nup{engine="0"} 1.0\n# HELP n n\n# TYPE n counter\nn 2.0\n'
    other = one.replace("1.0", "0.0")
    assert merged({"a": one, "b": other}).splitlines() == [
        "# HELP up u",
        "# TYPE up gauge",
        'up{replica="a",engine="0"} 1.0',
        'up{replica="b",engine="0"} 0.0',
        "# HELP n n",
        "# TYPE n counter",
        'n{replica="a"} 2.0',
        'n{replica="b"} 2.0',
    ]
