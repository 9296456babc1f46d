"""Waits that have no end of their own, as for NCCL on a GPU: a lost or late rank ends them."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from pw.engine.parallel import team as teams
from pw.engine.parallel.group import RankGroup
from pw.engine.parallel.team import Follower, Team
from pw.errors import EngineLostError


class Child:
    """Stands in for the process of a follower."""

    pid = 0

    def __init__(self, theirs: socket.socket) -> None:
        self._socket, self._code = theirs, cast(int | None, None)

    def end(self, code: int) -> None:
        """End; the other end of the socket sees it."""
        self._code = code
        self._socket.close()

    def wait(self, timeout: float | None = None) -> int:
        """See `subprocess.Popen`."""
        if self._code is None:
            raise subprocess.TimeoutExpired("follower", timeout or 0)
        return self._code

    def kill(self) -> None:
        """See `subprocess.Popen`."""
        self.end(-9)


class Stuck(Child):
    """A process that does not end by itself."""

    def wait(self, timeout: float | None = None) -> int:
        """See `subprocess.Popen`."""
        if self._code is None:
            time.sleep(timeout or 0)
        return super().wait(timeout)


class Device:
    """Stands in for the group, and for a device that waits in one of its sums for ever."""

    def __init__(self) -> None:
        self._left = threading.Event()

    def close(self) -> None:
        """See `RankGroup`."""
        self._left.set()

    def synchronize(self) -> None:
        """Return when nobody waits for the others any more."""
        assert self._left.wait(60), "the sum was not given up"


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


def make(
    sockets: tuple[socket.socket, socket.socket], folder: Path, timeout: float
) -> tuple[Team, Child, Device]:
    child, device = Child(sockets[1]), Device()
    follower = Follower(1, cast("subprocess.Popen[bytes]", child), sockets[0])
    team = Team([follower], folder / "ranks", timeout)
    team._group = cast(RankGroup, cast(Any, device))
    return team, child, device


@pytest.mark.parametrize("before", [True, False], ids=["between-steps", "in-a-step"])
def test_a_wait_ends_with_the_rank_that_it_waits_for(
    before: bool, sockets: tuple[socket.socket, socket.socket], tmp_path: Path
) -> None:
    team, child, device = make(sockets, tmp_path, 240.0)
    if before:
        child.end(-9)

    def step() -> None:
        with team.watched():
            if not before:
                child.end(-9)
            device.synchronize()

    with pytest.raises(EngineLostError, match="rank 1 of 2 has ended: SIGKILL"):
        step()
    team.close()


def test_what_breaks_on_sums_that_were_given_up_is_blamed_on_the_lost_rank(
    sockets: tuple[socket.socket, socket.socket], tmp_path: Path
) -> None:
    team, child, device = make(sockets, tmp_path, 240.0)
    error = RuntimeError("device-side assert triggered")

    def step(kill: bool) -> None:
        with team.blaming(), team.watched():
            if kill:
                child.end(-9)
                device.synchronize()
            raise error

    with pytest.raises(RuntimeError, match="device-side assert"):
        step(kill=False)
    with pytest.raises(EngineLostError, match="rank 1 of 2 has ended: SIGKILL") as caught:
        step(kill=True)
    assert caught.value.__cause__ is error
    team.abandon()
    assert not (tmp_path / "ranks").exists()


def test_a_wait_ends_when_a_rank_is_late(
    sockets: tuple[socket.socket, socket.socket], tmp_path: Path
) -> None:
    team, child, device = make(sockets, tmp_path, 0.2)
    with team.watched(60):
        pass  # kernels that are compiled count apart

    def step() -> None:
        with team.watched(0):
            device.synchronize()

    with pytest.raises(EngineLostError, match="the 2 ranks do not come together: one is late"):
        step()
    child.end(0)
    team.close()


def test_ranks_that_do_not_end_are_waited_for_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teams, "_END_SECONDS", 0.5)
    pairs = [socket.socketpair() for _ in range(5)]
    stuck = [Stuck(theirs) for _, theirs in pairs]
    followers = [
        Follower(rank, cast("subprocess.Popen[bytes]", child), ours)
        for rank, (child, (ours, _)) in enumerate(zip(stuck, pairs, strict=True), 1)
    ]
    team = Team(followers, tmp_path / "ranks", 240.0)
    began = time.monotonic()
    team.close()
    assert time.monotonic() - began < 1.5  # not half a second for each
    assert [follower.how_it_ended() for follower in followers] == ["SIGKILL"] * 5
