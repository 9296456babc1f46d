"""`serve` as a process: the banner's own snippets work, and signals drain, force, cut off."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest

from pw.errors import ConfigError
from pw.serving.context import ServingConfig
from pw.serving.server import serve
from tests.serving.fakes import STORY, FakeEngine, WordTokenizer

ROOT = Path(__file__).parents[2]


class Process:
    """A server process whose banner has been read."""

    def __init__(self, step_seconds, shutdown_timeout=30.0):
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.serving.serve_fake",
                str(step_seconds),
                str(shutdown_timeout),
            ],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.banner = ""
        while "print(" not in self.banner:
            line = self.process.stdout.readline()
            assert line, self.process.stderr.read()
            self.banner += line
        self.url = self.banner.split()[4]

    def end(self):
        """Exit code, and the rest of both outputs."""
        out, err = self.process.communicate(timeout=20)
        return self.process.returncode, out, err


@pytest.fixture
def launch():
    started = []

    def start(*arguments):
        started.append(Process(*arguments))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.process.kill()
            each.process.communicate()


def open_stream(url):
    """A stream whose first chunk has come, and the list its texts go to."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    stream = client.completions.create(model="fake", prompt="1", stream=True)
    texts = [next(stream).choices[0].text]
    errors = []

    def read():
        try:
            texts.extend(chunk.choices[0].text for chunk in stream)
        except Exception as error:
            errors.append(error)
        client.close()

    reader = threading.Thread(target=read)
    reader.start()
    return reader, texts, errors


def test_banner_can_be_pasted(launch):
    server = launch(0.0)
    assert server.banner.startswith("PagedWeight serves fake on http://127.0.0.1:")
    curl = next(line for line in server.banner.splitlines() if "curl" in line)
    answer = subprocess.run(
        ["bash", "-c", f"{curl} -sS"], capture_output=True, text=True, timeout=20
    )
    assert '"role":"assistant","content":"The 🦊' in answer.stdout, answer.stderr
    snippet = server.banner[server.banner.index("  from openai") :].replace("\n  ", "\n").strip()
    answer = subprocess.run(
        [sys.executable, "-c", snippet], capture_output=True, text=True, timeout=20
    )
    assert answer.stdout.startswith("The 🦊 jumps"), answer.stderr
    server.process.send_signal(signal.SIGINT)
    code, out, err = server.end()
    assert (code, out.strip()) == (0, "engine stopped")
    assert "Traceback" not in err


def test_first_signal_drains(launch):
    server = launch(0.06)
    reader, texts, errors = open_stream(server.url)
    server.process.send_signal(signal.SIGTERM)
    with httpx.Client(base_url=server.url) as http:
        while http.get("/health/ready").status_code == 200:
            time.sleep(0.005)
        assert http.get("/health/ready").status_code == 503
        assert http.get("/health/live").status_code == 200
        assert http.get("/v1/pw/status").json()["draining"]
        refused = http.post("/v1/completions", json={"prompt": "1"})
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["message"] == "server is shutting down"
    assert reader.is_alive()
    reader.join(20)
    assert ("".join(texts), errors) == ("".join(word + " " for word in STORY), [])
    code, out, err = server.end()
    assert (code, out.strip()) == (0, "engine stopped")
    assert "Traceback" not in err


def test_second_signal_cuts_off(launch):
    server = launch(60.0)
    outcomes = []

    def ask():
        try:
            answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "1"}, timeout=20)
            outcomes.append(answer.status_code)
        except httpx.HTTPError as error:
            outcomes.append(error)

    asker = threading.Thread(target=ask)
    asker.start()
    with httpx.Client(base_url=server.url) as http:
        while http.get("/v1/pw/status").json()["open_sequences"] == 0:
            time.sleep(0.01)
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert server.process.poll() is None
    begin = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    code, out, err = server.end()
    assert time.monotonic() - begin < 15
    asker.join(20)
    assert (code, out.strip()) == (1, "engine stopped")
    assert outcomes == [503]
    assert "Traceback" not in err


def test_time_over_ends_streams_with_an_error(launch):
    server = launch(0.5, 0.3)
    reader, texts, errors = open_stream(server.url)
    server.process.send_signal(signal.SIGTERM)
    reader.join(20)
    assert len(texts) < 4
    (error,) = errors
    assert isinstance(error, openai.APIError)
    assert "server is shutting down" in str(error)
    code, out, err = server.end()
    assert (code, out.strip()) == (1, "engine stopped")
    assert "Traceback" not in err


def test_a_failed_engine_ends_the_process(launch):
    """Its client is told first; then a supervisor can start the server again."""
    server = launch(0.0)
    body = {"prompt": [FakeEngine.DIE], "max_tokens": 50}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=10)
    assert answer.status_code == 500
    code, _, log = server.end()
    assert code == 1
    assert "the engine failed: leaving" in log


def test_port_in_use_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}") as caught:
            serve(FakeEngine(), WordTokenizer(), ServingConfig(("fake",)), port=port)
    assert "--port" in caught.value.hint
