"""Followers as threads of the test: all of a replica but the processes, without their start."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pw.engine.parallel import follower, messages, team
from pw.engine.start.ground import Ground
from pw.models.slicing import AllReduce
from support.patience import PATIENCE


class FollowerThread:
    """Stands in for the process of a follower; `pw.engine.parallel.follower.follow` runs in it.

    It starts when rank 0 has loaded: two threads must not build models at the same time.

    Attributes:
        followed: What it follows with, once it has loaded.
    """

    def __init__(self, sock: Any) -> None:
        self.pid = 0
        self.returncode: int | None = None
        self.followed: follower.Followed | None = None
        self._sock = sock
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)

    def begin(self) -> None:
        """Load, then follow."""
        self._thread.start()

    def wait(self, timeout: float | None = None) -> int:
        """See `subprocess.Popen`."""
        if self._thread.ident is None and timeout:
            self._sock.close()  # rank 0 has given up before it has loaded
            self.returncode = 0
        if self._thread.is_alive():
            self._thread.join(timeout)
        if self.returncode is None or self._thread.is_alive():
            raise subprocess.TimeoutExpired("follower", timeout or 0)
        return self.returncode

    def kill(self) -> None:
        """See `subprocess.Popen`; a thread ends by itself when its socket is closed."""
        self._thread.join(PATIENCE)

    def _run(self) -> None:
        link = follower.Link(self._sock)
        self.returncode = 1
        try:
            order = link.receive()
            assert isinstance(order, messages.Follow)
            follower.follow(order, link)
        except (EOFError, ConnectionError):
            self.returncode = 0
        except Exception as error:
            follower._say_lost(link, error)
        finally:
            self._sock.close()


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FollowerThread]]:
    """Let engines of several ranks start threads; those started, in order."""
    started: list[FollowerThread] = []
    cores = torch.get_num_threads()

    def launch(theirs: Any) -> FollowerThread:
        started.append(FollowerThread(theirs.dup()))
        return started[-1]

    agree = team.Team.agree_budget

    def begin_and_agree(self: team.Team, own: int) -> int:
        for thread in started:
            if thread.returncode is None and thread._thread.ident is None:
                thread.begin()
        return agree(self, own)

    make = follower.Followed

    def make_followed(ground: Ground, all_reduce: AllReduce) -> follower.Followed:
        followed = make(ground, all_reduce)
        mine = next(x for x in started if x.followed is None)
        mine.followed = followed
        return followed

    monkeypatch.setattr(team, "launch", launch)
    monkeypatch.setattr(team.Team, "agree_budget", begin_and_agree)
    monkeypatch.setattr(follower, "Followed", make_followed)
    yield started
    torch.set_num_threads(cores)  # steps of several threads have changed it
