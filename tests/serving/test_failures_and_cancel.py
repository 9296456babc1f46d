"""What goes wrong after admission: engine failures, clients that leave, a queue that is full."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from http.client import HTTPResponse

import httpx
import openai
import pytest

from pw.serving.context import ServingConfig
from pw.serving.limits import ServingLimits
from support.patience import PATIENCE
from tests.serving.conftest import abandoned, request_bytes, wait_for
from tests.serving.fakes import FakeEngine, WordTokenizer

BREAK, RAISE, ABORT, REFUSE, MUTE, HOLD = (
    FakeEngine.BREAK,
    FakeEngine.RAISE,
    FakeEngine.ABORT,
    FakeEngine.REFUSE,
    FakeEngine.MUTE,
    FakeEngine.HOLD,
)


class Log:
    """What the log says of the requests that `served` gets from now on, and of no others."""

    def __init__(self, served, caplog):
        caplog.set_level(logging.INFO)
        self._records, self._engine = caplog.records, served.engine
        self._before = set(served.engine.calls)

    def ids(self):
        return {call.rpartition("-")[0] for call in set(self._engine.calls) - self._before}

    def records(self):
        ids = self.ids()
        return [r for r in self._records if any(each in r.getMessage() for each in ids)]

    def line(self):
        (record,) = self.records()
        return record.getMessage()


def read_into(pieces, stream):
    for chunk in stream:
        pieces.append(chunk.choices[0].text)


@pytest.mark.parametrize("stream", [False, True])
def test_refusal_by_the_engine_is_a_400(served, stream):
    with pytest.raises(openai.BadRequestError, match="needs 9 pages of 8") as caught:
        served.openai.completions.create(model="fake", prompt=[REFUSE], stream=stream)
    assert caught.value.code == "context_length_exceeded"
    assert served.context.gate.open_sequences == 0


@pytest.mark.parametrize(
    ("trouble", "status", "sentence"),
    [
        (BREAK, 500, "generation failed: a kernel failed"),
        (RAISE, 500, "internal error"),
        (ABORT, 503, "server is shutting down"),
    ],
)
def test_failure_in_the_middle(served, trouble, status, sentence):
    body = {"model": "fake", "prompt": [[trouble], [1]], "max_tokens": 8}
    answer = served.http.post("/v1/completions", json=body)
    assert answer.status_code == status
    assert answer.json()["error"]["message"] == sentence
    assert "secret" not in answer.text
    assert ("retry-after" in answer.headers) == (status == 503)
    assert answer.headers.get("x-should-retry") == ("false" if status == 500 else None)
    assert answer.headers["x-request-id"]

    pieces = []
    stream = served.openai.completions.create(
        model="fake", prompt=[trouble], max_tokens=8, stream=True
    )
    with pytest.raises(openai.APIError, match=sentence):
        read_into(pieces, stream)
    assert pieces == ["The ", "🦊 ", "jumps "]
    raw = served.http.post(
        "/v1/completions", json={"prompt": [trouble], "max_tokens": 8, "stream": True}
    ).text
    last = raw.strip().split("\n\n")[-1].removeprefix("data: ")
    assert json.loads(last)["error"]["message"] == sentence
    assert served.context.gate.open_sequences == served.engine.running == 0
    assert not served.context.generations
    aborted = 'pw:request_aborted_total{engine="0",model_name="fake",reason="%s"}'
    assert served.metrics()[aborted % "client"] == 0
    assert served.metrics()[aborted % "error"] > 0


@pytest.mark.parametrize("trouble", [BREAK, RAISE])
def test_a_connection_outlives_a_failure(served, trouble):
    """Whoever keeps it open sends the next request on it and must not meet its end."""
    url = httpx.URL(served.url)
    answers = []
    with socket.create_connection((url.host, url.port), timeout=PATIENCE) as client:
        for prompt in ([trouble], [1]):
            client.sendall(request_bytes("/v1/completions", {"prompt": prompt, "max_tokens": 4}))
            answer = HTTPResponse(client)
            answer.begin()
            answers.append((answer.status, answer.getheader("connection")))
            answer.read()
    assert answers == [(500, None), (200, None)]


def test_a_bug_is_logged_once_with_its_request(served, caplog):
    headers = {"x-request-id": "the-buggy-one"}
    body = {"prompt": [RAISE], "max_tokens": 8}
    answer = served.http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 500
    assert answer.headers["x-request-id"] == "the-buggy-one"
    (record,) = [r for r in caplog.records if "the-buggy-one" in r.getMessage()]
    assert (record.levelno, record.exc_info[0]) == (logging.ERROR, ZeroDivisionError)
    assert not [r for r in caplog.records if "ASGI" in r.getMessage()]


def test_a_failure_of_the_engine_is_no_bug(served, caplog):
    headers = {"x-request-id": "the-failed-one"}
    answer = served.http.post("/v1/completions", json={"prompt": [BREAK]}, headers=headers)
    assert answer.status_code == 500
    assert not [r for r in caplog.records if "the-failed-one" in r.getMessage()]
    assert not [r for r in caplog.records if r.exc_info and "kernel" in str(r.exc_info[1])]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 4])
def test_client_that_leaves_before_the_first_token(served, path, stream, n, caplog):
    log, aborted = Log(served, caplog), len(served.engine.aborted)
    text = f"{MUTE} " + "1 " * 3000
    fields = {"stream": stream, "n": n}
    if path == "completions":
        fields["prompt"] = text
    else:
        fields["messages"] = [{"role": "user", "content": text}]
    with abandoned(served.url, f"/v1/{path}", fields):
        wait_for(lambda: served.engine.running == n)
    wait_for(lambda: served.context.gate.open_sequences == 0)
    (request,) = log.ids()
    assert sorted(served.engine.aborted[aborted:]) == [f"{request}-{i}" for i in range(n)]
    assert served.engine.running == 0
    told = f"sequences {n}, tokens in {3001 * n}, out 0, finish gone, queue -, ttft -"
    assert told in log.line()
    assert log.records()[0].levelno == logging.INFO


def test_the_log_tells_what_was_sent_before_a_failure(served, caplog):
    """The engine's last word has no tokens and no bits; those before it count."""
    log = Log(served, caplog)
    served.http.post("/v1/completions", json={"prompt": [BREAK], "max_tokens": 8})
    line = log.line()
    assert "out 3, finish error, " in line
    assert line.endswith("bits 5.50 to 5.50")


@pytest.mark.parametrize(
    ("prompts", "ends"), [([REFUSE], "refused"), ([MUTE, BREAK], "aborted,error")]
)
def test_the_log_tells_how_sequences_without_an_end_ended(served, caplog, prompts, ends):
    log = Log(served, caplog)
    served.http.post("/v1/completions", json={"prompt": [[token] for token in prompts]})
    assert f"finish {ends}, " in log.line()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_by_the_engine_is_counted_once(served, n, stream):
    """Nothing ran: nothing was given up, neither the sequence nor those that came with it."""
    before = served.metrics()
    served.http.post("/v1/completions", json={"prompt": [REFUSE], "n": n, "stream": stream})
    wait_for(lambda: not served.context.generations)
    after = served.metrics()
    names = 'pw:%s_total{engine="0",model_name="fake",reason="%s"}'
    refused = names % ("requests_rejected", "context_length_exceeded")
    assert after[refused] - before.get(refused, 0) == 1
    for reason in ("client", "engine", "error"):
        aborted = names % ("request_aborted", reason)
        assert after[aborted] == before[aborted]


def test_client_that_leaves_a_stream(start, caplog):
    with start() as served:
        log = Log(served, caplog)
        stream = served.openai.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": str(HOLD)}], stream=True
        )
        next(stream)
        wait_for(lambda: served.engine.running == 1)
        stream.close()
        wait_for(lambda: served.context.gate.open_sequences == 0)
        assert served.engine.running == 0
        (request,) = served.engine.calls
        assert served.engine.aborted == [request]
        name = 'pw:request_aborted_total{engine="0",model_name="fake",reason="client"}'
        assert served.metrics()[name] == 1
        assert "finish gone" in log.line()
        assert log.records()[0].levelno == logging.INFO


def test_socket_closed_in_the_middle_of_the_body(served):
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b'content-length: 500\r\n\r\n{"prompt": '
        )
        time.sleep(0.05)
    assert served.http.get("/health").status_code == 200


def test_full_queue_is_a_503_with_retry_after(start):
    config = ServingConfig(("fake",), limits=ServingLimits(max_open_sequences=4))
    with start(config=config) as served:
        stream = served.openai.completions.create(model="fake", prompt=[HOLD], n=3, stream=True)
        next(stream)
        refused = served.http.post("/v1/completions", json={"prompt": "1", "n": 2})
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "server_overloaded"
        with pytest.raises(openai.InternalServerError, match="3 of 4"):
            served.openai.completions.create(model="fake", prompt="1", n=2)
        fits = served.openai.completions.create(model="fake", prompt="1", max_tokens=1)
        assert fits.choices[0].text == "The "
        never = served.http.post("/v1/completions", json={"prompt": "1", "n": 5})
        assert never.status_code == 400
        stream.close()
        wait_for(lambda: served.context.gate.open_sequences == 0)
        assert served.http.post(
            "/v1/completions", json={"prompt": "1", "n": 4, "max_tokens": 1}
        ).is_success
        rejected = 'pw:requests_rejected_total{engine="0",model_name="fake",reason="%s"}'
        assert served.metrics()[rejected % "server_overloaded"] == 2
        assert served.metrics()[rejected % "invalid_value"] == 1


def test_prompt_tokens_that_wait_are_bounded(start):
    limits = ServingLimits(max_queued_tokens=10)
    with start(config=ServingConfig(("fake",), limits=limits)) as served:

        def ask(tokens, n=1):
            body = {"prompt": [1] * tokens, "n": n, "max_tokens": 1}
            return served.http.post("/v1/completions", json=body)

        assert ask(50).is_success  # nobody waits
        with abandoned(served.url, "/v1/completions", {"prompt": [MUTE] + [1] * 3}):
            wait_for(lambda: served.engine.running == 1)
            assert ask(6).is_success
            for refused in (ask(7), ask(4, n=2)):
                assert refused.status_code == 503
                assert refused.headers["retry-after"] == "1"
                error = refused.json()["error"]
                assert error["code"] == "server_overloaded"
                assert error["message"] == "queue is full: 4 of 10 prompt tokens wait"
        wait_for(lambda: served.context.gate.open_sequences == 0)
        with abandoned(served.url, "/v1/completions", {"prompt": [HOLD] + [1] * 9, "n": 2}):
            wait_for(lambda: served.engine.tokens >= 6)  # they have begun: they wait no more
            wait_for(lambda: ask(10).is_success)
        wait_for(lambda: served.context.gate.open_sequences == 0)
        assert ask(10).is_success


@pytest.mark.parametrize("why", ["full", "draining"])
def test_who_cannot_be_admitted_is_turned_away_unread(start, why):
    """Nothing is spent on it: the answer comes before the body, whatever that is."""
    limits = ServingLimits(max_open_sequences=1)
    with start(config=ServingConfig(("fake",), limits=limits, api_keys=("k",))) as served:
        key = {"authorization": "Bearer k"}
        with served.context.gate.admit(1):
            served.context.gate.draining = why == "draining"
            for path in ("/v1/completions", "/v1/chat/completions"):
                assert told_before_the_body(served.url, path, "Bearer k") == (503, "1", 200)
                assert told_before_the_body(served.url, path, "Bearer x")[0] == 401
                assert served.http.get(path, headers=key).status_code == 405
            body = {"prompt": "1 2"}
            assert served.http.post("/tokenize", json=body, headers=key).is_success
            served.context.gate.draining = False
        metrics = served.http.get("/metrics", headers=key).text
        code = {"full": "server_overloaded", "draining": "engine_unavailable"}[why]
        assert (
            f'pw:requests_rejected_total{{engine="0",model_name="fake",reason="{code}"}} 2.0'
            in (metrics)
        )
        for path in ("/v1/completions", "/v1/chat/completions"):
            labels = f'{{handler="{path}",method="POST",status="503"}}'
            assert f"pw:http_requests_total{labels} 1.0" in metrics
        assert served.http.post("/v1/completions", json={"prompt": "1"}, headers=key).is_success


def told_before_the_body(url, path, key):
    """Status and Retry-After of a request whose body comes late; status of the next one."""
    address = httpx.URL(url)
    with socket.create_connection((address.host, address.port), timeout=PATIENCE) as client:
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: {key}\r\ncontent-length: 5\r\n"
        client.sendall(f"{head}\r\n".encode())
        answer = HTTPResponse(client)
        answer.begin()
        answer.read()
        client.sendall(b"nonse")
        client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        health = HTTPResponse(client)
        health.begin()
        status = 200 if health.status == 503 else health.status  # as it drains
        return answer.status, answer.getheader("retry-after"), status


def test_dead_engine_is_told_at_once(start):
    with start() as served:
        served.engine.alive = False
        assert served.http.get("/health").status_code == 503
        assert served.http.get("/health/live").status_code == 200
        answer = served.http.post("/v1/completions", json={"prompt": "1"})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_unavailable"
        assert answer.headers["retry-after"]
        served.engine.alive = True
        assert served.http.post("/v1/completions", json={"prompt": "1"}).is_success


def test_long_tokenization_stalls_nobody(start):
    encoding, go_on = threading.Event(), threading.Event()

    class Slow(WordTokenizer):
        def encode(self, text, *, add_special_tokens=True):
            if text == "slow":
                encoding.set()
                assert go_on.wait(PATIENCE)
            return super().encode(text)

    with start(FakeEngine(step_seconds=0.01), Slow()) as served:
        stream = served.openai.completions.create(model="fake", prompt="1", stream=True)
        next(stream)
        answers = []
        slow = threading.Thread(
            target=lambda: answers.append(
                served.http.post("/v1/completions", json={"prompt": "slow"})
            )
        )
        slow.start()
        assert encoding.wait(PATIENCE)
        assert len(list(stream)) > 3
        assert httpx.get(f"{served.url}/health", timeout=PATIENCE).status_code == 200
        assert not answers
        go_on.set()
        slow.join()
        assert answers[0].is_success
