"""The engine's process as its parent sees it: started, awaited, ended. Speaks no asyncio.

Parent and child share a socket pair that has no name in any file system: nobody else can connect to
it, and nothing of it is left behind. The child is in a session of its own, so that Ctrl-C reaches
the parent alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Self

from pw import errors
from pw.engine.process import wire
from pw.errors import PwError

WORKER = ("-m", "pw.engine.process.worker")
_KINDS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, PwError) and kind is not errors.RequestError
}


class EngineProcess:
    """A child that loads an engine. Make it with `launch`.

    Attributes:
        socket: Our end; read by `wait_until_ready`, then handed to an event loop.
        pid: The child's.
    """

    def __init__(self, child: subprocess.Popen[bytes], sock: socket.socket) -> None:
        self._child, self.socket = child, sock
        self.pid = child.pid

    @classmethod
    def launch(cls, load: wire.Load, worker: Sequence[str] = WORKER) -> EngineProcess:
        """Start a child and tell it what to load; it does so while the caller goes on.

        Args:
            load: The artifact and the settings.
            worker: Arguments of Python that start the child; the number of its end of the socket
                is appended.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            child = subprocess.Popen(
                # -P: what lies in the current folder is imported only if we do so, too
                [sys.executable, "-P", *worker, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                env=os.environ
                | {"PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)},
                stdin=subprocess.DEVNULL,
                stdout=2,  # results are ours alone
                start_new_session=True,
            )
        process = cls(child, ours)
        with contextlib.suppress(OSError):  # it has ended already: `wait_until_ready` says why
            ours.sendall(wire.frame(load))
        return process

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end(0.0)

    def wait_until_ready(self) -> wire.Ready:
        """Wait until the engine is loaded; a child that cannot load it is gone afterwards.

        Raises:
            PwError: The error that stopped it, as if it had been raised here.
            OSError: The same, of a file.
        """
        try:
            answer = wire.decode_from_engine(wire.read_body(self.socket))
        except (EOFError, ConnectionError):
            raise PwError(
                f"the engine process ended while it loaded: {self.end(1.0)}",
                "it may have been out of memory: see the system's log",
            ) from None
        if isinstance(answer, wire.Ready):
            return answer
        self.end(1.0)
        raise _error_of(answer)

    def end(self, seconds: float) -> str:
        """Close our end, wait for at most so long, then kill the child; how it ended."""
        self.socket.close()
        try:
            self._child.wait(seconds)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        code = self._child.returncode
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def _error_of(answer: wire.FromEngine) -> PwError | OSError:
    if not isinstance(answer, wire.StartFailed):
        raise TypeError(f"not an answer to Load: {type(answer).__name__}")
    if answer.kind == "OSError":
        return OSError(answer.errno, answer.message, answer.filename)
    if answer.kind:
        return _KINDS[answer.kind](answer.message, answer.hint)
    return PwError(f"the engine cannot be loaded: {answer.message}", "its traceback stands above")
