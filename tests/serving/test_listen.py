"""Where and how a server listens: TLS, Unix sockets, browsers, proxies, headers."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from pw.errors import ConfigError
from pw.serving.context import ServingConfig
from pw.serving.limits import ServingLimits
from pw.serving.listen import Endpoint
from pw.serving.server import DrainingServer, _uvicorn_config, how_to_call
from support.patience import PATIENCE, get, options, post
from tests.serving.fakes import FakeEngine, WordTokenizer

TLS = Path(__file__).parent / "tls"
CERTIFICATE, KEY = TLS / "certificate.pem", TLS / "key.pem"


@contextmanager
def listening(endpoint: Endpoint, origins: tuple[str, ...] = (), **config: object) -> Iterator[str]:
    """A server in a thread, as `serve` makes it; its URL."""
    from pw.serving.app import create_app

    app = create_app(
        FakeEngine(),
        WordTokenizer(),
        ServingConfig(("fake",), **config),  # type: ignore[arg-type]
        allowed_origins=origins,
    )
    started = threading.Event()
    with endpoint.listening() as listener:
        server = DrainingServer(_uvicorn_config(app, endpoint), app.state.context, 1.0, started.set)
        thread = threading.Thread(
            target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True
        )
        thread.start()
        try:
            assert started.wait(PATIENCE)
            yield endpoint.url(listener)
        finally:
            server.should_exit = True
            thread.join(PATIENCE)


def test_tls() -> None:
    context = ssl.create_default_context(cafile=str(CERTIFICATE))
    with listening(Endpoint(port=0, ssl_certfile=CERTIFICATE, ssl_keyfile=KEY)) as url:
        assert url.startswith("https://127.0.0.1:")
        assert get(f"{url}/health", verify=context).status_code == 200
        with pytest.raises(httpx.TransportError):
            get(url.replace("https", "http") + "/health")


def test_a_certificate_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    bad = tmp_path / "bad.pem"
    bad.write_text("no certificate")
    missing = tmp_path / "missing.pem"
    for arguments, message in (
        ({"ssl_certfile": bad, "ssl_keyfile": KEY}, f"not a certificate and its key: `{bad}`"),
        ({"ssl_certfile": CERTIFICATE, "ssl_keyfile": bad}, "not a certificate and its key"),
        ({"ssl_certfile": CERTIFICATE}, "not a certificate and its key"),
        ({"ssl_certfile": missing, "ssl_keyfile": KEY}, f"cannot read `{missing}`: No such"),
        ({"ssl_certfile": CERTIFICATE, "ssl_keyfile": missing}, f"cannot read `{missing}`"),
        ({"ssl_keyfile": KEY}, "--ssl-keyfile needs --ssl-certfile"),
        ({"root_path": "api"}, "must begin with a slash: `api`"),
    ):
        with pytest.raises(ConfigError, match=message):
            Endpoint(**arguments)  # type: ignore[arg-type]


def test_a_unix_socket_is_made_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "pw.sock"
    endpoint = Endpoint(uds=path)
    endpoint.check_free()
    assert not path.exists()
    with listening(endpoint) as url:
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(base_url=url, transport=transport, timeout=PATIENCE) as http:
            assert http.get("/health").status_code == 200
        with pytest.raises(ConfigError, match="a server listens there"):
            endpoint.check_free()
        assert path.exists()
    assert not path.exists()

    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    assert path.exists()
    endpoint.check_free()  # nobody listens on it

    path.write_text("precious")
    with pytest.raises(ConfigError, match="a file of that name exists") as caught:
        endpoint.check_free()
    assert "--uds" in caught.value.hint
    assert path.read_text() == "precious"
    with pytest.raises(ConfigError, match="cannot listen on"):
        Endpoint(uds=tmp_path / ("x" * 200)).check_free()


def test_the_banner_of_a_unix_socket_names_it() -> None:
    text = how_to_call("http://localhost", "fake", chat=False, keyed=False, uds=Path("/run/a b"))
    assert "PagedWeight serves fake on /run/a b" in text
    assert "curl --unix-socket '/run/a b' http://localhost/v1/completions" in text


def test_a_taken_port_is_known_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: ") as caught:
            Endpoint(port=port).check_free()
    assert "--port" in caught.value.hint
    assert "attempting" not in caught.value.message
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:0: ") as caught:
        Endpoint("192.0.2.1", 0).check_free()  # an address kept for documentation
    assert "--host" in caught.value.hint
    with pytest.raises(ConfigError, match=r"cannot listen on nowhere\.invalid:0: ") as caught:
        Endpoint("nowhere.invalid", 0).check_free()
    assert "--host" in caught.value.hint


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_answers_do_not_wait_for_acknowledgements(host: str) -> None:
    if host == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    with Endpoint(host=host, port=0).listening() as listener:
        address = listener.getsockname()[:2]
        with socket.create_connection(address, timeout=PATIENCE), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_browsers_may_call_from_named_origins_only() -> None:
    ask = {"origin": "https://ui.example", "access-control-request-method": "POST"}
    ask["access-control-request-headers"] = "authorization,content-type"
    with listening(Endpoint(port=0), ("https://ui.example",), api_keys=("k",)) as url:
        answer = options(f"{url}/v1/completions", headers=ask)  # carries no key
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://ui.example"
        assert "authorization" in answer.headers["access-control-allow-headers"]
        other = options(f"{url}/v1/completions", headers=ask | {"origin": "https://evil"})
        assert other.status_code == 400
        assert "access-control-allow-origin" not in other.headers
        refused = post(f"{url}/v1/completions", json={"prompt": "1"}, headers=ask)
        assert refused.status_code == 401  # with the headers that let the page read why
        assert refused.headers["access-control-allow-origin"] == "https://ui.example"
    with listening(Endpoint(port=0)) as url:
        answer = post(f"{url}/v1/completions", json={"prompt": "1"}, headers=ask)
        assert answer.is_success
        assert "access-control-allow-origin" not in answer.headers


def test_a_proxy_may_show_the_server_under_a_path() -> None:
    with listening(Endpoint(port=0, root_path="/llm"), api_keys=("k",)) as url:
        key = {"authorization": "Bearer k"}
        assert get(f"{url}/health").status_code == 200  # open, under whatever path
        assert get(f"{url}/v1/models").status_code == 401
        assert get(f"{url}/v1/models", headers=key).is_success
        servers = get(f"{url}/openapi.json", headers=key).json()["servers"]
        assert servers == [{"url": "/llm"}]


def test_headers_are_bounded_in_number_and_size() -> None:
    with listening(Endpoint(port=0)) as url:
        many = {f"x-{number}": "1" for number in range(101)}
        answer = get(f"{url}/health", headers=many)
        assert answer.status_code == 431
        assert answer.json()["error"]["code"] == "too_many_headers"
        assert answer.headers["x-request-id"]
        few = dict(list(many.items())[:80])
        assert get(f"{url}/health", headers=few).status_code == 200
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as raw:
            raw.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"a" * (1 << 20))
            received = b""
            try:
                while data := raw.recv(1000):
                    received += data
            except ConnectionResetError:
                pass
            assert received.startswith(b"HTTP/1.1 431") or not received
        assert get(f"{url}/health").status_code == 200


def test_limits_of_time_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="request_timeout"):
        ServingLimits(request_timeout=0.0)


def test_a_socket_is_for_those_that_the_umask_says(tmp_path: Path) -> None:
    path = tmp_path / "pw.sock"
    before = os.umask(0o077)
    try:
        with Endpoint(uds=path).listening():
            assert path.stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)
