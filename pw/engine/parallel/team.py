"""Rank 0's view of the other ranks: started, told what to do, watched, ended.

Followers are children on the same machine, each at the other end of a socket pair that has no name.
They do what they are told in the order in which they are told it, and end when the socket closes.
A follower that ends before takes the replica with it: the loss is noticed at the next safe point,
or in a sum over the ranks that fails or times out, and there it is an `EngineLostError`.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import select
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from pw import errors, logs
from pw.config import EngineConfig
from pw.engine.parallel import messages
from pw.engine.parallel.child import Follower, launch
from pw.engine.parallel.group import RankGroup
from pw.errors import ConfigError, EngineLostError, PwError, StoreError
from pw.memory.budget import MemoryPlan

logger = logging.getLogger(__name__)

_REASON_SECONDS = 1.0  # for the end of a follower to be seen after a sum has failed
_STUCK_SECONDS = 5.0  # for a step that waits for a lost rank to give up
_COMPILE_SECONDS = 120.0  # of a step in which kernels are compiled, beside the ranks' wait
_END_SECONDS = 5.0  # for followers to end by themselves
_LOOK_SECONDS = 0.25  # between looks at the clock

_Answer = TypeVar(
    "_Answer",
    messages.Here,
    messages.Planned,
    messages.Ready,
    messages.Fetched,
    messages.Compared,
)


def plan_digest(plan: MemoryPlan, step_tokens: int) -> str:
    """What ranks compare to see that they divide the budget alike: page ids mean the same.

    Args:
        plan: Of a rank.
        step_tokens: Most tokens of its steps: each rank settles them by its own plan.
    """
    numbers = (plan.num_pages, plan.page_bytes, plan.layouts, plan.max_model_len, step_tokens)
    return hashlib.blake2b(repr(numbers).encode(), digest_size=8).hexdigest()


class Team:
    """The followers of a replica. Make it with `start`.

    Args:
        followers: By rank, from 1.
        folder: Where the ranks meet; removed at the end.
        timeout: Seconds that a rank waits for the others in a sum.

    Attributes:
        dense: Bytes of dense weights of each follower.
        host: Bytes of the host store of each.
    """

    def __init__(self, followers: Sequence[Follower], folder: Path, timeout: float) -> None:
        self.followers = tuple(followers)
        self.size = len(followers) + 1
        self.dense: list[int] = []
        self.host: list[int] = []
        self._folder, self._timeout = folder, timeout
        self._changes: list[messages.Change] = []
        self._group: RankGroup | None = None
        self._deadline: float | None = None  # of the step in hand, if one is
        self._late = self._given_up = False
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="pw-ranks", daemon=True).start()

    @classmethod
    def start(cls, path: Path, config: EngineConfig) -> Team:
        """Start the other ranks, with as many CPU threads as this one. They load while it does."""
        size = config.tensor_parallel_size
        folder = Path(tempfile.mkdtemp(prefix="pw-ranks-"))
        threads = torch.get_num_threads()
        started: list[Follower] = []
        for rank in range(1, size):
            ours, theirs = socket.socketpair()
            with theirs:
                child = launch(theirs)
            ours.settimeout(config.collective_timeout)
            started.append(Follower(rank, child, ours))
            order = messages.Follow(path.resolve(), config, logs.current(), rank, folder, threads)
            with contextlib.suppress(OSError):  # it has ended already: the first answer says why
                ours.sendall(messages.frame(order))
        return cls(started, folder, config.collective_timeout)

    # -- the start -------------------------------------------------------------------------

    def agree_budget(self, own: int) -> int:
        """Bytes that each rank divides: the least that any has."""
        budgets = [here.budget for here in self._await(messages.Here)]
        budget = min(own, *budgets)
        self._send(messages.Budget(budget))
        return budget

    def connect(self, device: torch.device, plan: str) -> RankGroup:
        """Meet the followers, once they have come to the same memory plan.

        Raises:
            PwError: One has not, or has ended.
        """
        answers = self._await(messages.Planned)
        for follower, answer in zip(self.followers, answers, strict=True):
            if answer.plan != plan:
                raise ConfigError(
                    f"rank {follower.rank} of {self.size} divides the memory budget otherwise: "
                    f"{answer.plan}, rank 0: {plan}",
                    "the ranks need equal devices",
                )
        self.dense = [answer.dense for answer in answers]
        try:
            with self.watched():
                self._group = RankGroup(0, self.size, self._folder, device, self._timeout)
        except RuntimeError as error:
            raise PwError(f"the ranks cannot meet: {self.reason(error)}") from error
        return self._group

    def await_ready(self) -> None:
        """Send the first turn, and wait until every follower has made it."""
        self.turn()
        self.host = [ready.host for ready in self._await(messages.Ready)]

    @property
    def group(self) -> RankGroup:
        """The ranks, connected."""
        assert self._group is not None
        return self._group

    def capture(self, most: int) -> None:
        """Have the followers capture decode steps, while the caller does."""
        self._send(messages.Capture(most))

    # -- at work ---------------------------------------------------------------------------

    def note(self, change: messages.Change) -> None:
        """Have the followers make a change in their next turn."""
        self._changes.append(change)

    def turn(self, step: messages.Step | None = None) -> None:
        """Send what was noted, and a step to compute."""
        changes, self._changes = self._changes, []
        self._send(messages.Turn(changes, step))

    def progress(self) -> list[tuple[int, messages.Progress]]:
        """Ends of copies that followers have told of since the last call, each with its rank."""
        return [
            (follower.rank, message)
            for follower in self.followers
            for message in follower.receive(0)
            if isinstance(message, messages.Progress)
        ]

    def fetch(self, index: int, bits: int) -> None:
        """Have every follower read the LUT of a reduction before it is made anywhere.

        Raises:
            StoreError: One cannot.
            EngineLostError: One does not answer.
        """
        self._send(messages.Fetch(index, bits))
        with self.watched():  # it may have steps to make before
            answers = self._await(messages.Fetched)
        for follower, answer in zip(self.followers, answers, strict=True):
            if answer.error is not None:
                raise StoreError(f"rank {follower.rank}: {answer.error}")

    def compare(self, digest: str) -> None:
        """See that the page table of every follower says what ours does, once all is told.

        Raises:
            AssertionError: One says something else.
        """
        self.turn()
        self._send(messages.Compare())
        with self.watched():
            answers = self._await(messages.Compared)
        for follower, answer in zip(self.followers, answers, strict=True):
            if answer.digest != digest:
                raise AssertionError(f"rank {follower.rank} has another page table than rank 0")

    @contextlib.contextmanager
    def watched(self, seconds: float = _COMPILE_SECONDS) -> Iterator[None]:
        """Around what waits for the other ranks: on a CPU a step's sums, on a GPU its results.

        Args:
            seconds: That it may take, beside the wait.

        Raises:
            EngineLostError: The others were given up meanwhile: what has come out means nothing.
        """
        outer = self._deadline
        if outer is None:
            self._deadline = time.monotonic() + seconds + self._timeout
        try:
            yield
        finally:
            self._deadline = outer
        if self._given_up:
            raise EngineLostError(self.reason(TimeoutError("they were given up")))

    @contextlib.contextmanager
    def in_step(self, seconds: float = _COMPILE_SECONDS) -> Iterator[None]:
        """A step that the ranks compute together. Whatever breaks in it breaks the replica.

        Args:
            seconds: See `watched`.

        Raises:
            EngineLostError: It broke, with what is known of the reason.
        """
        with self.watched(seconds):
            try:
                yield
            except Exception as error:
                raise EngineLostError(self.reason(error)) from error

    def check(self) -> None:
        """See that all followers live.

        Raises:
            EngineLostError: One has ended.
        """
        for follower in self.followers:
            if (how := follower.how_it_ended()) is not None:
                raise EngineLostError(f"rank {follower.rank} of {self.size} has ended: {how}")

    @contextlib.contextmanager
    def blaming(self) -> Iterator[None]:
        """Around all that reads results of a step.

        Sums that were given up leave garbage on the device, on which anything may break.

        Raises:
            EngineLostError: The others were given up before something broke: it is their loss.
        """
        try:
            yield
        except Exception as error:
            if self._given_up and not isinstance(error, EngineLostError):
                raise EngineLostError(self.reason(error)) from error
            raise

    def reason(self, error: Exception) -> str:
        """Why the ranks do not come together, in a line: a rank that has ended, else the error."""
        for follower in self.followers:
            with contextlib.suppress(OSError):
                follower.receive(0)
            if (how := follower.how_it_ended(_REASON_SECONDS / self.size)) is not None:
                return f"rank {follower.rank} of {self.size} has ended: {how}"
        if self._late:
            return f"the {self.size} ranks do not come together: one is late"
        line = str(error).partition("\n")[0]
        return f"the {self.size} ranks do not come together: {type(error).__name__}: {line}"

    def close(self) -> None:
        """End the followers. None is left behind."""
        self._closed.set()
        for follower in self.followers:
            with contextlib.suppress(OSError):
                follower.socket.shutdown(socket.SHUT_RDWR)
        if self._group is not None:
            self._group.close()
        deadline = time.monotonic() + _END_SECONDS  # of all together
        for follower in self.followers:
            follower.end(deadline)
            follower.socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def abandon(self) -> None:
        """End the followers at once, and leave the group as it is: this process ends, too."""
        self._closed.set()
        for follower in self.followers:
            follower.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- inside ----------------------------------------------------------------------------

    def _send(self, message: messages.ToFollower) -> None:
        data = messages.frame(message)
        for follower in self.followers:
            try:
                follower.socket.sendall(data)
            except OSError as error:
                raise EngineLostError(self.reason(error)) from error

    def _await(self, kind: type[_Answer]) -> list[_Answer]:
        """One answer of a kind from each follower.

        Raises:
            PwError: A follower ends instead; its error, as if it had been raised here.
            EngineLostError: They were given up, where the wait is watched.
        """
        return [self._answer(follower, kind) for follower in self.followers]

    def _answer(self, follower: Follower, kind: type[_Answer]) -> _Answer:
        while True:
            found = follower.receive(0.2)
            for place, message in enumerate(found):
                if isinstance(message, kind):
                    follower.put_back(found[:place] + found[place + 1 :])
                    return message
            follower.put_back(found)
            if self._given_up:
                raise EngineLostError(self.reason(TimeoutError("one does not answer")))
            if (how := follower.how_it_ended()) is not None:
                follower.receive(0)
                lost = follower.lost
                error = getattr(errors, lost.kind, PwError) if lost else PwError
                why = lost.message if lost else how
                raise error(
                    f"rank {follower.rank} of {self.size} cannot take part: {why}",
                    lost.hint if lost else "it may have been out of memory: see the system's log",
                )

    def _watch(self) -> None:
        """Give the ranks up when a step waits for one that is lost or late.

        NCCL's sums have no end of their own: without a rank they wait on the device for ever. If
        that cannot be stopped, the process ends here.
        """
        poll = select.poll()
        for follower in self.followers:
            poll.register(follower.socket, 0)  # hang-ups are always reported
        gone = False
        while not self._closed.is_set():
            if gone:
                time.sleep(_LOOK_SECONDS)  # the next safe point sees it, or the next step's end
            else:
                gone = bool(poll.poll(_LOOK_SECONDS * 1e3))
            deadline = self._deadline
            self._late = deadline is not None and time.monotonic() > deadline
            if deadline is not None and (gone or self._late):
                break
        if self._closed.is_set():
            return
        self._given_up = True
        if self._group is not None:
            self._group.close()
        if not self._closed.wait(_STUCK_SECONDS) and self._deadline is not None:
            logger.critical("a step cannot be ended: %s", self.reason(TimeoutError("it waits")))
            logging.shutdown()
            os._exit(1)
