"""The demo runs `pw` as a user does: as a command, in a process of its own."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pw.errors import PwError

_START_SECONDS = 120.0
_STOP_SECONDS = 30.0
# A second thread of torch waits in a spinning loop: on two cores, shared with the client that
# sends the load, that costs more than it brings.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


def run_command(arguments: Sequence[str]) -> None:
    """Run `pw ARGUMENTS` to its end; its output goes where ours goes.

    Raises:
        PwError: It failed; its own message stands above.
    """
    print(f"$ pw {shlex.join(arguments)}", flush=True)
    code = subprocess.run(_command(arguments), env=_environment(), check=False).returncode
    if code:
        raise PwError(f"`pw {arguments[0]}` ended with exit code {code}")


@contextmanager
def serving(arguments: Sequence[str], log: Path) -> Iterator[str]:
    """Run `pw serve ARGUMENTS` for the length of the block.

    Args:
        arguments: Of `serve`; the port is chosen here.
        log: Gets what the server prints.

    Yields:
        The server's address.

    Raises:
        PwError: It does not start, or does not end well when told to stop.
    """
    arguments = ["serve", *arguments, "--port", "0"]
    print(f"$ pw {shlex.join(arguments)}", flush=True)
    with log.open("w", encoding="utf-8") as sink:
        process = subprocess.Popen(
            _command(arguments), env=_environment(), stdout=sink, stderr=subprocess.STDOUT
        )
        try:
            yield _wait_for_address(process, log)
            process.send_signal(signal.SIGTERM)
            if code := process.wait(_STOP_SECONDS):
                raise PwError(f"the server ended with exit code {code}", f"see `{log}`")
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def _command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "pw", *arguments]


def _environment() -> dict[str, str]:
    return {**_ENVIRONMENT, **os.environ, "PYTHONUNBUFFERED": "1"}


def _wait_for_address(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        text = log.read_text(encoding="utf-8")
        if found := re.search(r" on (http://\S+)", text):
            return found[1]
        if process.poll() is not None:
            reason = text.strip().splitlines()[-1:] or ["it said nothing"]
            raise PwError(f"the server did not start: {reason[0]}", f"see `{log}`")
        time.sleep(0.1)
    raise PwError(f"the server did not start within {_START_SECONDS:.0f} s", f"see `{log}`")
