"""The engine's side of the socket: a server that does not read costs its streams, no memory."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from pw.engine.process import wire, worker
from pw.engine.request import SamplingParams
from support.patience import PATIENCE
from support.step_engine import StepEngine


class Other:
    """The API process's end of a worker that runs in a thread."""

    def __init__(self, engine: StepEngine) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(PATIENCE)
        self._inbox = wire.FrameBuffer()
        self.code: int | None = None
        self.left: list[int] = []  # exit codes of a process that ends as it is

        def run() -> None:
            with theirs:
                self.code = worker.serve(
                    engine,  # type: ignore[arg-type]
                    theirs,
                    leave=self.left.append,
                )

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def send(self, *messages: wire.ToEngine) -> None:
        for message in messages:
            self.socket.sendall(wire.frame(message))

    def receive(self) -> list[wire.FromEngine]:
        """What has come, at least one message; none when the engine has ended."""
        while data := self.socket.recv(1 << 16):
            if bodies := self._inbox.feed(data):
                return [wire.decode_from_engine(body) for body in bodies]
        return []


def note_arrivals(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """An event that is set when the engine has dealt with the next request it is sent."""
    seen, add = threading.Event(), worker.Worker._add

    def noting(self: worker.Worker, command: wire.Add) -> None:
        add(self, command)
        seen.set()

    monkeypatch.setattr(worker.Worker, "_add", noting)
    return seen


@pytest.fixture
def engine() -> StepEngine:
    return StepEngine(max_running=64)


@pytest.fixture
def other(engine: StepEngine) -> Iterator[Other]:
    end = Other(engine)
    yield end
    end.socket.close()
    end.thread.join(PATIENCE)
    assert not end.thread.is_alive()
    assert engine.closed


def test_ready_comes_first_and_signs_of_life_follow_busy_or_idle(other: Other) -> None:
    first, *rest = other.receive()
    assert isinstance(first, wire.Ready)
    while len(rest) < 3:
        rest += other.receive()
    assert {type(message) for message in rest} == {wire.Status}
    other.send(wire.Add("a", [1], SamplingParams()))
    busy: list[wire.FromEngine] = []
    while not any(isinstance(m, wire.Status) and m.status.running for m in busy):
        busy += other.receive()
    assert any(isinstance(message, wire.Outputs) for message in busy)


def test_a_server_that_does_not_read_loses_its_streams(
    engine: StepEngine, other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "MAX_BACKLOG_BYTES", 1 << 20)
    names = {f"r{number}" for number in range(8)}
    other.send(*(wire.Add(name, [1], SamplingParams()) for name in sorted(names)))
    deadline = time.monotonic() + PATIENCE
    while engine.aborted < len(names):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    steps = engine.steps
    seen = note_arrivals(monkeypatch)  # nothing is read before: reading makes room again
    other.send(wire.Add("late", [1], SamplingParams()))
    assert seen.wait(PATIENCE)
    last: dict[str, wire.RequestOutput] = {}
    refused: list[wire.Refused] = []
    bytes_unread = 0
    while not refused:
        for message in other.receive():
            if isinstance(message, wire.Outputs):
                last |= {output.request_id: output for output in message.outputs}
                bytes_unread += len(wire.frame(message))
            refused += [message] if isinstance(message, wire.Refused) else []
    assert set(last) == names
    assert {(out.finish_reason, out.error_code) for out in last.values()} == {
        ("error", "slow_reader")
    }
    assert bytes_unread < (1 << 20) + 2_000_000  # the limit and what the sockets hold
    refusal = refused[0].refusal
    assert refusal is not None
    assert (refused[0].request_id, refusal.code) == ("late", "server_overloaded")
    assert engine.steps == steps
    other.send(wire.Add("again", [1], SamplingParams(max_tokens=2)))
    found: list[wire.RequestOutput] = []
    while len(found) < 2:
        for message in other.receive():
            found += message.outputs if isinstance(message, wire.Outputs) else []
    assert [output.completion_tokens for output in found] == [1, 2]


def test_an_engine_beyond_help_says_so_and_ends(engine: StepEngine, other: Other) -> None:
    other.send(wire.Add("a", [StepEngine.LOSE], SamplingParams()))
    messages: list[wire.FromEngine] = []
    while received := other.receive():
        messages += received
    assert messages[-1] == wire.Failed("EngineLostError: no device any more")
    other.thread.join(PATIENCE)
    assert (other.code, other.left) == (1, [1])
    assert engine.abandoned  # nothing was done to a device that may be lost


def test_a_closed_socket_ends_the_loop(engine: StepEngine, other: Other) -> None:
    other.send(wire.Add("a", [1], SamplingParams()))
    select.select([other.socket], [], [], PATIENCE)
    other.socket.close()
    other.thread.join(PATIENCE)
    assert (other.code, other.left, engine.abandoned) == (0, [], False)
