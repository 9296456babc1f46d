"""`serve` as a process: the banner's own snippets work, and signals drain, force, cut off."""

from __future__ import annotations

import gc
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack

import httpx
import openai
import pytest

from pw.errors import ConfigError
from pw.serving.context import ServingConfig
from pw.serving.listen import Endpoint
from pw.serving.server import serve
from support.patience import PATIENCE, allowed
from support.served import Stream, server_process
from tests.serving.conftest import wait_for
from tests.serving.fakes import STORY, FakeEngine, WordTokenizer


@pytest.fixture
def launch():
    with ExitStack() as running:
        yield lambda *arguments: running.enter_context(
            server_process("-m", "tests.serving.serve_fake", *map(str, arguments))
        )


def test_the_garbage_collector_overlooks_what_is_there_from_the_start(monkeypatch):
    """A full collection of it takes 70 ms and more, in which no stream gets a token."""
    frozen = []

    def run(serving):
        serving.close()
        frozen.append(gc.get_freeze_count())

    monkeypatch.setattr("pw.serving.server.asyncio.run", run)
    before = gc.get_freeze_count()
    serve(FakeEngine(), WordTokenizer(), ServingConfig(("fake",)), endpoint=Endpoint(port=0))
    assert frozen[0] > before + 10_000
    assert gc.get_freeze_count() == 0


def test_banner_can_be_pasted(launch):
    server = launch(0.0, 30.0)
    server.finish_banner()
    assert server.banner.startswith("PagedWeight serves fake on http://127.0.0.1:")
    curl = next(line for line in server.banner.splitlines() if "curl" in line)
    answer = subprocess.run(
        ["bash", "-c", f"{curl} -sS"], capture_output=True, text=True, timeout=PATIENCE
    )
    assert '"role":"assistant","content":"The 🦊' in answer.stdout, answer.stderr
    snippet = server.banner[server.banner.index("  from openai") :].replace("\n  ", "\n").strip()
    answer = subprocess.run(
        [sys.executable, "-c", snippet], capture_output=True, text=True, timeout=PATIENCE
    )
    assert answer.stdout.startswith("The 🦊 jumps"), answer.stderr
    server.process.send_signal(signal.SIGINT)
    code, out, err = server.end()
    assert (code, out.strip()) == (0, "engine stopped")
    assert err.splitlines()[-1] == "INFO:pw.serving:stopped"
    assert "Traceback" not in err


def test_first_signal_drains(launch):
    server = launch(0.0, PATIENCE, "paced")
    stream = Stream(server.url)
    server.process.send_signal(signal.SIGTERM)
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
        wait_for(lambda: http.get("/health/ready").status_code == 503)
        assert http.get("/health/live").status_code == 200
        assert http.get("/v1/pw/status").json()["draining"]
        refused = http.post("/v1/completions", json={"prompt": "1"})
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["message"] == "server is shutting down"
    assert stream.reader.is_alive()
    server.process.send_signal(signal.SIGUSR1)  # the stream goes on
    stream.join()
    assert ("".join(stream.texts), stream.errors) == ("".join(word + " " for word in STORY), [])
    code, out, err = server.end()
    assert (code, out.strip()) == (0, "engine stopped")
    assert err.splitlines()[-1] == "INFO:pw.serving:stopped"
    assert "Traceback" not in err


def test_second_signal_cuts_off(launch):
    server = launch(60.0, 30.0)
    outcomes = []

    def ask():
        try:
            answer = httpx.post(
                f"{server.url}/v1/completions", json={"prompt": "1"}, timeout=PATIENCE
            )
            outcomes.append(answer.status_code)
        except httpx.HTTPError as error:
            outcomes.append(error)

    asker = threading.Thread(target=ask)
    asker.start()
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
        wait_for(lambda: http.get("/v1/pw/status").json()["open_sequences"] == 1)
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: http.get("/health/ready").status_code == 503)
    assert server.process.poll() is None
    begin = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    code, out, err = server.end()
    assert time.monotonic() - begin < allowed(2)
    asker.join(PATIENCE)
    assert (code, out.strip()) == (1, "engine stopped")
    assert outcomes == [503]
    assert "finish aborted" in err
    assert "Traceback" not in err


def test_time_over_ends_streams_with_an_error(launch):
    server = launch(0.0, 0.3)
    stream = Stream(server.url, [FakeEngine.HOLD])
    server.process.send_signal(signal.SIGTERM)
    stream.join()
    assert "".join(stream.texts) == "The 🦊 jumps "
    (error,) = stream.errors
    assert isinstance(error, openai.APIError)
    assert "server is shutting down" in str(error)
    code, out, err = server.end()
    assert (code, out.strip()) == (1, "engine stopped")
    assert "Traceback" not in err


def test_a_failed_engine_ends_the_process(launch):
    """Its client is told first; then a supervisor can start the server again."""
    server = launch(0.0, 30.0)
    body = {"prompt": [FakeEngine.DIE], "max_tokens": 50}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE)
    assert answer.status_code == 500
    code, _, log = server.end()
    assert code == 1
    assert "the engine failed: leaving" in log


def test_port_in_use_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}") as caught:
            serve(
                FakeEngine(),
                WordTokenizer(),
                ServingConfig(("fake",)),
                endpoint=Endpoint(port=port),
            )
    assert "--port" in caught.value.hint
