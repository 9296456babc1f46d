"""What goes wrong after admission: engine failures, clients that leave, a queue that is full."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time

import httpx
import openai
import pytest

from pw.serving.context import ServingConfig
from pw.serving.limits import ServingLimits
from tests.serving.fakes import FakeEngine, WordTokenizer

BREAK, RAISE, ABORT, REFUSE, MUTE = (
    FakeEngine.BREAK,
    FakeEngine.RAISE,
    FakeEngine.ABORT,
    FakeEngine.REFUSE,
    FakeEngine.MUTE,
)


def wait_for(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


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


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 4])
def test_client_that_leaves_before_the_first_token(served, path, stream, n, caplog):
    caplog.set_level(logging.INFO, "pw.serving")
    served.engine.calls.clear()
    served.engine.aborted.clear()
    text = f"{MUTE} " + "1 " * 3000
    fields = {"stream": stream, "n": n}
    if path == "completions":
        fields["prompt"] = text
    else:
        fields["messages"] = [{"role": "user", "content": text}]
    with pytest.raises(httpx.ReadTimeout):
        served.http.post(f"/v1/{path}", json=fields, timeout=0.1)
    wait_for(lambda: served.context.gate.open_sequences == 0)
    assert sorted(served.engine.aborted) == sorted(served.engine.calls)
    assert len(served.engine.aborted) == n
    assert served.engine.running == 0
    lines = [record for record in caplog.records if record.name == "pw.serving"]
    assert len(lines) == 1
    assert (
        f"sequences {n}, tokens in {3001 * n}, out 0, finish gone, queue -, ttft -"
        in lines[0].message
    )
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_log_tells_what_was_sent_before_a_failure(served, caplog):
    """The engine's last word has no tokens and no bits; those before it count."""
    caplog.set_level(logging.INFO, "pw.serving")
    served.http.post("/v1/completions", json={"prompt": [BREAK], "max_tokens": 8})
    (line,) = [r.message for r in caplog.records if "finish" in r.message]
    assert "out 3, finish error, " in line
    assert line.endswith("bits 5.50 to 5.50")


@pytest.mark.parametrize(
    ("prompts", "ends"), [([REFUSE], "refused"), ([MUTE, BREAK], "aborted,error")]
)
def test_the_log_tells_how_sequences_without_an_end_ended(served, caplog, prompts, ends):
    caplog.set_level(logging.INFO, "pw.serving")
    served.http.post("/v1/completions", json={"prompt": [[token] for token in prompts]})
    (line,) = [r.message for r in caplog.records if "finish" in r.message]
    assert f"finish {ends}, " in line


def test_client_that_leaves_a_stream(start, caplog):
    with start(FakeEngine(step_seconds=0.02)) as served:
        stream = served.openai.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "1"}], stream=True
        )
        next(stream)
        assert served.engine.running == 1
        stream.close()
        wait_for(lambda: served.engine.running == 0)
        (request,) = served.engine.calls
        assert served.engine.aborted == [request]
        before = served.engine.tokens
        time.sleep(0.1)
        assert served.engine.tokens == before < 12
        name = 'pw:request_aborted_total{engine="0",model_name="fake",reason="client"}'
        assert served.metrics()[name] == 1
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


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
    with start(FakeEngine(step_seconds=0.05), config=config) as served:
        stream = served.openai.completions.create(model="fake", prompt="1", n=3, stream=True)
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
        assert len(list(stream)) > 3
        assert served.http.post(
            "/v1/completions", json={"prompt": "1", "n": 4, "max_tokens": 1}
        ).is_success
        rejected = 'pw:requests_rejected_total{engine="0",model_name="fake",reason="%s"}'
        assert served.metrics()[rejected % "server_overloaded"] == 2
        assert served.metrics()[rejected % "invalid_value"] == 1


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
    class Slow(WordTokenizer):
        def encode(self, text, *, add_special_tokens=True):
            if text == "slow":
                time.sleep(1.0)
            return super().encode(text)

    with start(FakeEngine(step_seconds=0.01), Slow()) as served:
        stream = served.openai.completions.create(model="fake", prompt="1", stream=True)
        next(stream)
        slow = threading.Thread(
            target=served.http.post, args=("/v1/completions",), kwargs={"json": {"prompt": "slow"}}
        )
        slow.start()
        begin = time.monotonic()
        list(stream)
        assert httpx.get(f"{served.url}/health").status_code == 200
        assert time.monotonic() - begin < 0.8
        assert slow.is_alive()
        slow.join()
