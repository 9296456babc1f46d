"""Streams under stress: silence, late starts, deadlines, clients that read nothing."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from contextlib import AsyncExitStack

import pytest

from pw.engine.request import RequestOutput
from pw.serving.connection import EventStream
from pw.serving.context import ServingConfig
from pw.serving.limits import ServingLimits
from support.patience import PATIENCE, run_in_virtual_time
from tests.serving.conftest import wait_for
from tests.serving.fakes import FakeEngine

COMPLETIONS = "/v1/completions"


def limited(**fields):
    return ServingConfig(("fake",), limits=ServingLimits(**fields))


def test_silence_is_broken_by_comments(start):
    """A word is said when the comment that it waits for has come; before the first, too."""

    body = {"prompt": "1", "max_tokens": 3, "stream": True}
    with start(config=limited(sse_ping_interval=0.1)) as served:
        served.engine.allowed = 0
        pings, events = 0, []
        with served.http.stream("POST", COMPLETIONS, json=body) as answer:
            for line in answer.iter_lines():
                if line == ": ping":
                    pings += 1
                    served.engine.allowed = len(events) + 1
                elif line:
                    events.append(line)
        served.engine.allowed = None
        assert pings >= 3
        assert len(events) == 4
        assert events[-1] == "data: [DONE]"
        parsed = served.openai.completions.create(model="fake", **body)
        assert len(list(parsed)) == 3


@pytest.mark.parametrize(("gap", "comments"), [(14.0, 0), (31.0, 20)])
def test_comments_come_after_silence_only(gap, comments):
    sent = []

    async def send(message):
        sent.append(message.get("body", b""))

    async def events():
        for number in range(10):
            await asyncio.sleep(gap)
            yield {"number": number}

    run_in_virtual_time(stream_of(events(), 15.0, send))
    assert sent.count(b": ping\n\n") == comments
    assert len([body for body in sent if body.startswith(b"data: {")]) == 10


def test_a_refusal_before_the_first_token_has_a_status(start):
    with start(config=limited(sse_ping_interval=5)) as served:
        body = {"prompt": [FakeEngine.REFUSE], "stream": True}
        assert served.http.post(COMPLETIONS, json=body).status_code == 400


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["1", [FakeEngine.MUTE]])
def test_a_request_ends_at_its_deadline(start, stream, prompt):
    limits = limited(request_timeout=0.4, sse_ping_interval=0.2)
    with start(FakeEngine(step_seconds=0.15), config=limits) as served:
        begin = time.monotonic()
        answer = served.http.post(COMPLETIONS, json={"prompt": prompt, "stream": stream})
        assert 0.3 < time.monotonic() - begin < PATIENCE
        if stream:
            *_, last, end = answer.text.split("\n\n")
            assert end == ""
            error = json.loads(last.removeprefix("data: "))["error"]
        else:
            assert answer.status_code == 504
            error = answer.json()["error"]
        assert (error["code"], error["type"]) == ("timeout", "server_error")
        assert "0.4 s" in error["message"]
        assert served.context.gate.open_sequences == 0
        assert served.engine.aborted


def test_encoding_counts_against_the_deadline(start):
    with start(config=limited(request_timeout=0.2)) as served:

        async def slow(*_args, **_options):
            await asyncio.sleep(30)

        served.context.encoder.completion = slow
        answer = served.http.post(COMPLETIONS, json={"prompt": "1"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        assert not served.engine.calls


def test_a_client_that_reads_nothing_is_given_up(start):
    class Chatty(FakeEngine):
        produced = 0

        async def generate(self, request_id, prompt_token_ids, params):
            while True:
                Chatty.produced += 1
                yield RequestOutput(request_id, text="x" * 10_000, token_ids=(1,))
                await asyncio.sleep(0)

    engine = Chatty()
    with start(engine, config=limited(send_timeout=0.3, buffered_outputs=8)) as served:
        port = int(served.url.rsplit(":", 1)[1])
        with socket.create_connection(("127.0.0.1", port)) as client:
            body = json.dumps({"prompt": "1", "stream": True})
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                + f"content-length: {len(body)}\r\n\r\n{body}".encode()
            )
            wait_for(lambda: engine.aborted and served.context.gate.open_sequences == 0)
            produced = Chatty.produced
            time.sleep(0.1)
            assert Chatty.produced == produced  # nobody fills a buffer any more
        assert served.http.get("/health").status_code == 200


def test_a_comment_never_cuts_into_an_event():
    sent = []

    async def send(message):
        if message["type"] == "http.response.body":
            sent.append(b"<" + message["body"][:6])
            await asyncio.sleep(0.03)  # slower than the comments come
            sent.append(b">")

    async def events():
        for number in range(5):
            yield {"number": number}
            await asyncio.sleep(0.04)

    run_in_virtual_time(stream_of(events(), 0.01, send))
    assert sent[::2].count(b"<: ping") >= 3
    assert sent[1::2] == [b">"] * (len(sent) // 2)


async def stream_of(events, ping_interval, send):
    """Send events to a client that stays."""

    async def receive():
        await asyncio.sleep(3600)

    stream = EventStream(
        events, AsyncExitStack(), headers={}, ping_interval=ping_interval, send_timeout=5
    )
    await stream({}, receive, send)
