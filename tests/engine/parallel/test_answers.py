"""What followers tell between two answers is kept, and who does not answer is given up."""

from __future__ import annotations

import logging
import socket
import threading
from pathlib import Path

import pytest

from pw.config import EngineConfig
from pw.engine.parallel import follower, messages
from pw.engine.parallel.team import Team
from pw.engine.process.wire import FrameBuffer
from pw.errors import EngineLostError
from pw.logs import LogSettings
from tests.engine.parallel.test_watched_ranks import make, sockets

__all__ = ["sockets"]


def test_ends_of_copies_that_come_before_an_answer_are_kept(
    sockets: tuple[socket.socket, socket.socket], tmp_path: Path
) -> None:
    team, _, _ = make(sockets, tmp_path, 240.0)
    told = [messages.Progress([1], {}), messages.Fetched(None), messages.Progress([], {2: "no"})]
    sockets[1].sendall(b"".join(map(messages.frame, told)))
    team.fetch(0, 3)
    assert team.progress() == [(1, told[0]), (1, told[2])]


def test_a_rank_that_does_not_answer_is_given_up(
    sockets: tuple[socket.socket, socket.socket], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Team.watched.__wrapped__, "__defaults__", (0.0,))  # type: ignore[attr-defined]
    team, _, _ = make(sockets, tmp_path, 0.2)
    ended: list[str] = []

    def look(team: Team) -> None:
        with pytest.raises(EngineLostError) as caught:
            team.fetch(0, 3)
        ended.append(str(caught.value))

    asker = threading.Thread(target=look, args=(team,), daemon=True)
    asker.start()
    asker.join(60)
    assert ended == ["the 2 ranks do not come together: one is late"]


def test_a_follower_tells_a_fault_of_its_own_before_its_process_ends_as_it_is(
    sockets: tuple[socket.socket, socket.socket], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = sockets
    told: list[bytes] = []
    left: list[int] = []
    opened: list[socket.socket] = []

    def broken(_order: messages.Follow, _link: follower.Link) -> None:
        raise RuntimeError("device-side assert triggered")

    def leave(code: int) -> None:
        told.append(ours.recv(1 << 16))
        left.append(code)

    monkeypatch.setattr(follower, "follow", broken)
    monkeypatch.setattr(follower, "leave", leave)
    monkeypatch.setattr(follower, "end_with_the_other_end", opened.append)
    monkeypatch.setattr(follower.signal, "signal", lambda *_: None)  # type: ignore[attr-defined]
    monkeypatch.setattr(follower.logs, "configure", lambda *_: None)  # type: ignore[attr-defined]
    (tmp_path / "ranks").mkdir()
    order = messages.Follow(
        tmp_path, EngineConfig(), LogSettings(logging.INFO, "text"), 1, tmp_path / "ranks", 1
    )
    ours.sendall(messages.frame(order))
    follower.main([str(theirs.detach())])
    opened[0].close()
    (body,) = FrameBuffer().feed(told[0])
    lost = messages.decode_from_follower(body)
    assert lost == messages.Lost("", "RuntimeError: device-side assert triggered")
    assert left == [1]
    assert not order.folder.exists()
