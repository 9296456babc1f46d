"""Servers as processes, for tests that send them signals: started, awaited, asked, ended."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai

from support.patience import PATIENCE

ROOT = Path(__file__).parents[2]


class ServerProcess:
    """A server process whose banner has been read.

    Args:
        arguments: Of Python.
    """

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.banner = ""
        while "-d " not in self.banner:  # the end of the line with curl
            line = self.process.stdout.readline()
            assert line, self.process.stderr.read()
            self.banner += line
        self.url = self.banner.split()[4]

    def finish_banner(self) -> None:
        """Read on to the end of the Python snippet."""
        assert self.process.stdout is not None
        while "print(" not in self.banner:
            self.banner += self.process.stdout.readline()

    def end(self) -> tuple[int, str, str]:
        """Exit code, and the rest of both outputs."""
        out, err = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, out, err

    def children(self) -> list[int]:
        """Processes that it has started: one, the engine's."""
        pid = self.process.pid
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]


@contextmanager
def server_process(*arguments: str) -> Iterator[ServerProcess]:
    """A server for the length of the block; killed if it still runs then."""
    server = ServerProcess(*arguments)
    with server.process:
        try:
            yield server
        finally:
            if server.process.poll() is None:
                server.process.kill()


class Stream:
    """A completion's stream that is read by a thread; its first chunk has come."""

    def __init__(self, url: str, prompt: Any = "1", model: str = "fake", **options: Any) -> None:
        client = openai.OpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE
        )
        stream = client.completions.create(model=model, prompt=prompt, stream=True, **options)
        self.texts = [next(stream).choices[0].text]
        self.errors: list[Exception] = []
        self.finish_reason: str | None = None

        def read() -> None:
            try:
                for chunk in stream:
                    self.texts.append(chunk.choices[0].text)
                    self.finish_reason = chunk.choices[0].finish_reason or self.finish_reason
            except Exception as error:
                self.errors.append(error)
            client.close()

        self.reader = threading.Thread(target=read, daemon=True)
        self.reader.start()

    def join(self) -> Stream:
        """Wait for its end."""
        self.reader.join(PATIENCE)
        assert not self.reader.is_alive()
        return self
