"""A rank that follows rank 0: makes the same changes, computes the same steps, decides nothing.

Started by `pw.engine.parallel.team` as `python -m pw.engine.parallel.follower FD`. It ends when the
other end of its socket is closed, however that came about, or at a fault of its own.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import signal
import socket
import sys
from typing import NoReturn

import torch

from pw import logs
from pw.engine.parallel import messages
from pw.engine.parallel.follow import DictatedPool, Followed
from pw.engine.parallel.group import RankGroup
from pw.engine.parallel.seat import Seat
from pw.engine.parallel.team import plan_digest
from pw.engine.process import wire
from pw.engine.process.worker import end_with_the_other_end, leave
from pw.engine.start.ground import device_of, lay_ground
from pw.errors import PwError

logger = logging.getLogger(__name__)


class Link:
    """Our end of the socket: whole messages, one after the other."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def receive(self) -> messages.ToFollower:
        """The next message.

        Raises:
            EOFError: Rank 0 has gone.
        """
        return messages.decode_to_follower(wire.read_body(self._socket))

    def send(self, message: messages.FromFollower) -> None:
        """Tell rank 0."""
        self._socket.sendall(messages.frame(message))

    def agree_budget(self, own: int) -> int:
        """Bytes that every rank divides."""
        self.send(messages.Here(own))
        answer = self.receive()
        assert isinstance(answer, messages.Budget)
        return answer.bytes


def main(arguments: list[str]) -> int:
    """Load what rank 0 says, then follow it.

    Returns:
        The exit code: 0 when the other end is closed, 1 after a fault.
    """
    # Rank 0 decides what signals mean; when it ends, its end of the socket is closed.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sock = socket.socket(fileno=int(arguments[0]))
    end_with_the_other_end(sock)
    link = Link(sock)
    order = None
    try:
        order = link.receive()
        assert isinstance(order, messages.Follow)
        logs.configure(order.logs.level, order.logs.style)
        follow(order, link)
    except (EOFError, ConnectionError):
        _tidy(order)
        return 0
    except Exception as error:
        _say_lost(link, error)
        _tidy(order)
        leave(1)  # while the error holds all that took part in it


def follow(order: messages.Follow, link: Link) -> NoReturn:
    """Take the seat, load, then make turn after turn until rank 0 has gone.

    At a fault the device is left alone, as it may be lost, and the group is not left: who waits for
    this rank sees its process end.

    Raises:
        EOFError, ConnectionError: Rank 0 has gone.
        Exception: A fault of this rank.
    """
    device = device_of(order.config, order.rank)
    if device.type == "cpu":
        torch.set_num_threads(order.threads)
    config = order.config
    seat = Seat(order.rank, config.tensor_parallel_size, config.enable_expert_parallel)
    ground = lay_ground(
        order.artifact,
        config,
        device,
        seat=seat,
        agree=link.agree_budget,
        make_pool=DictatedPool,
    )
    dense = ground.loaded.skeleton.dense_bytes
    link.send(messages.Planned(plan_digest(ground.memory, ground.demand.chunk_tokens), dense))
    group = RankGroup(seat.rank, seat.size, order.folder, device, config.collective_timeout)
    seat.reduction.connect(group.all_reduce)
    followed = Followed(ground, group.all_reduce)
    try:
        _make_turns(followed, link, group)
    except (EOFError, ConnectionError):
        followed.release()
        group.close()
        raise


def _make_turns(followed: Followed, link: Link, group: RankGroup) -> NoReturn:
    ready = False
    while True:
        message = link.receive()
        if isinstance(message, messages.Fetch):
            link.send(messages.Fetched(followed.fetch(message.index, message.bits)))
            continue
        if isinstance(message, messages.Compare):
            link.send(messages.Compared(followed.compare()))
            continue
        if isinstance(message, messages.Capture):
            followed.capture(message.most, group.agree)
            continue
        assert isinstance(message, messages.Turn)
        progress = followed.change(message.changes)
        if progress is not None:
            link.send(progress)
        if not ready and message.step is None:
            ready = True
            link.send(messages.Ready(followed.host_bytes))
        if message.step is not None:
            followed.compute(message.step)


def _say_lost(link: Link, error: Exception) -> None:
    """Tell rank 0 why this rank ends."""
    if isinstance(error, PwError):
        message = messages.Lost(type(error).__name__, error.message, error.hint)
    else:
        logger.error("a rank stopped at a fault of its own", exc_info=error)
        message = messages.Lost("", f"{type(error).__name__}: {error}")
    with contextlib.suppress(OSError):
        link.send(message)


def _tidy(order: messages.ToFollower | None) -> None:
    """Remove the folder where the ranks met: where rank 0 was killed, nobody else does."""
    if isinstance(order, messages.Follow):
        shutil.rmtree(order.folder, ignore_errors=True)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
