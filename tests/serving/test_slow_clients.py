"""Connections on which no request comes, or half of one, or no HTTP: ended, and told why."""

from __future__ import annotations

import json
import resource
import socket
from collections.abc import Iterator

import httpx
import pytest

from pw.serving import http_protocol, server
from pw.serving.context import ServingConfig
from pw.serving.headers import MAX_HEADER_BYTES
from pw.serving.limits import ServingLimits
from support.patience import PATIENCE
from tests.serving.conftest import Served, request_bytes, serving

BODY = {"model": "fake", "prompt": [1, 2], "max_tokens": 2}


@pytest.fixture(scope="module")
def hasty() -> Iterator[Served]:
    """A server that hardly waits for the rest of a body."""
    config = ServingConfig(("fake",), limits=ServingLimits(body_timeout=0.05))
    with serving(config=config) as running:
        yield running


def said(served: Served, sent: bytes) -> bytes:
    """All that the server says to some bytes, up to its closing the connection."""
    address = httpx.URL(served.url)
    with socket.create_connection((address.host, address.port), timeout=PATIENCE) as client:
        client.sendall(sent)
        heard = b""
        while data := client.recv(1 << 16):
            heard += data
    return heard


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", b"GET / HTTP/1.1\r\nhost: x\r\nx: "])
def test_half_a_head_is_not_waited_for(
    served: Served, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.05)
    assert said(served, sent) == b""


def test_half_a_second_head_neither(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    address = httpx.URL(served.url)
    with socket.create_connection((address.host, address.port), timeout=PATIENCE) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 OK\r\n")
        monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.05)
        client.sendall(b"GET /hea")
        assert client.recv(1 << 16) == b""


def test_half_a_body_is_a_408(hasty: Served) -> None:
    heard = said(hasty, request_bytes("/v1/completions", BODY)[:-3])
    assert heard.startswith(b"HTTP/1.1 408 ")
    assert json.loads(heard.partition(b"\r\n\r\n")[2])["error"]["code"] == "timeout"


def test_an_answer_may_take_longer_than_its_request(hasty: Served) -> None:
    hasty.engine.step_seconds = 0.1
    address = httpx.URL(hasty.url)
    with socket.create_connection((address.host, address.port), timeout=PATIENCE) as client:
        client.sendall(request_bytes("/v1/completions", BODY))
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400, "invalid_value"),
        (b"GET /health HTTP/1.1\r\n\r\n", 400, "invalid_value"),
        # One byte too many: nothing is left unread when the server closes, which would be a reset.
        (b"GET / HTTP/1.1\r\nx: ".ljust(MAX_HEADER_BYTES + 1, b"a"), 431, "headers_too_large"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip\r\n\r\n", 400, "invalid_value"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n", 400, "invalid_value"),
    ],
)
def test_what_is_no_http_is_refused_in_the_shape_of_all_errors(
    served: Served, sent: bytes, status: int, code: str
) -> None:
    head, _, body = said(served, sent).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"x-request-id: " in head
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    assert served.http.get("/health").status_code == 200


def test_broken_chunks_after_a_refusal_end_the_connection(served: Served) -> None:
    """The refusal has gone out before the body breaks: there is no second one."""
    head = b"POST /v1/nothing HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    address = httpx.URL(served.url)
    with socket.create_connection((address.host, address.port), timeout=PATIENCE) as client:
        client.sendall(head)
        heard = client.recv(1 << 16)
        client.sendall(b"ZZ\r\n")
        while data := client.recv(1 << 16):
            heard += data
    assert heard.count(b"HTTP/1.1 ") == 1
    assert heard.startswith(b"HTTP/1.1 404 ")


def test_health_answers_head(served: Served) -> None:
    for path in ("/health", "/health/live", "/health/ready", "/ready", "/ping"):
        answer = served.http.head(path)
        assert (answer.status_code, answer.content) == (200, b"")


def test_a_server_takes_all_file_descriptors_that_it_may_have() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        server._allow_many_connections()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
