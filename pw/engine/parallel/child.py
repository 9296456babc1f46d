"""Rank 0's end of one other rank: its process, and what it says."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time

from pw.engine.parallel import messages
from pw.engine.process.wire import FrameBuffer

_RECEIVE_BYTES = 1 << 16


def launch(theirs: socket.socket) -> subprocess.Popen[bytes]:
    """Start a follower with its end of a socket."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "pw.engine.parallel.follower", str(theirs.fileno())],
        pass_fds=(theirs.fileno(),),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)},
        stdin=subprocess.DEVNULL,
        stdout=2,  # results are rank 0's alone
        start_new_session=True,
    )


class Follower:
    """One other rank: its process, and our end of the socket."""

    def __init__(self, rank: int, child: subprocess.Popen[bytes], sock: socket.socket) -> None:
        self.rank, self._child, self.socket = rank, child, sock
        self._inbox = FrameBuffer()
        self._messages: list[messages.FromFollower] = []
        self.lost: messages.Lost | None = None

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._child.pid

    def receive(self, seconds: float | None) -> list[messages.FromFollower]:
        """Messages that have come; waits for the first for at most so long, None = for ever."""
        readable, _, _ = select.select([self.socket], [], [], seconds)
        if readable:
            with contextlib.suppress(ConnectionError):
                for body in self._inbox.feed(self.socket.recv(_RECEIVE_BYTES)):
                    message = messages.decode_from_follower(body)
                    if isinstance(message, messages.Lost):
                        self.lost = message
                    else:
                        self._messages.append(message)
        taken, self._messages = self._messages, []
        return taken

    def put_back(self, unread: list[messages.FromFollower]) -> None:
        """Have the next `receive` give these first: ends of copies come between answers."""
        self._messages = unread + self._messages

    def how_it_ended(self, seconds: float = 0.0) -> str | None:
        """How its process has ended, after waiting for so long; None if it lives."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._child.wait(seconds)
            if self.lost is not None:
                return self.lost.message
            return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        return None

    def end(self, deadline: float) -> None:
        """See to it that it is gone; it may end by itself until then, on the monotonic clock."""
        if self.how_it_ended(max(0.0, deadline - time.monotonic())) is None:
            self.kill()
            self._child.wait()

    def kill(self) -> None:
        """Have it end now; a driver may take its time for that, which is not waited for."""
        self._child.kill()
