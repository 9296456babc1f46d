"""What followers tell between two answers is kept, and who does not answer is given up."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from pw.engine.parallel import messages
from pw.engine.parallel.team import Team
from pw.errors import EngineLostError
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
