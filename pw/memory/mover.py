"""Copies planes and LUTs from the host store into arena pages. Never changes committed bits.

    start   queues a raise, urgent or not, and reads what is on disk ahead of its turn
    poll    hands chunks to the lane, at most `lane.depth` under way, and says what has landed
    drop    gives up what has not been handed over

Raises started between two polls, such as those of one plan, are one batch: their parts are sorted
by their place on the host, so that neighbours travel as one copy. Urgent batches go first.
On a GPU chunks travel on a stream of their own while steps run; on a CPU each `poll` copies one,
so that raises take several steps there too and the states in between are the same.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pw.errors import StoreError
from pw.memory.arena import Arena
from pw.memory.host_store import HostPlaneStore
from pw.memory.lanes import Lane, lane_of
from pw.memory.page_table import Raise

CHUNK_BYTES = 4 << 20  # an urgent need waits for so much at most, `lane.depth` times
READERS = 4  # threads that read what is on disk
_READ_AHEAD = 2 * READERS  # parts read and not yet copied, at most
_BURST_SECONDS = 1 / 16  # worth of the transfer budget that may travel at once


@dataclass(eq=False)
class _Task:
    """A raise on its way."""

    move: Raise
    left: int  # pages that have not arrived
    flying: int = 0  # pages in chunks under way
    error: Exception | None = None


@dataclass(eq=False)
class _Part:
    """Pages of a raise that are copied together."""

    task: _Task
    pages: list[int]
    from_bits: int
    fence: Any
    place: tuple[int, int] | None  # on the host, so that neighbours are found
    source: Tensor | None = None  # [pages, page_bytes]; None: on disk
    read: Future[Tensor] | None = None
    done: int = 0  # pages handed to the lane


@dataclass(eq=False)
class _Chunk:
    ticket: Any
    shares: list[tuple[_Task, int]] = field(default_factory=list)  # pages of each raise


class _Budget:
    """A token bucket of bytes. What is taken may exceed what is there: it is owed."""

    def __init__(self, rate: float, clock: Callable[[], float]) -> None:
        self._rate, self._clock = rate, clock
        self._most = self._tokens = rate * _BURST_SECONDS
        self._then = clock()

    def open(self) -> bool:
        """Whether anything may be taken now."""
        now = self._clock()
        self._tokens = min(self._most, self._tokens + (now - self._then) * self._rate)
        self._then = now
        return self._tokens > 0

    def take(self, count: int) -> None:
        """Take bytes."""
        self._tokens -= count


class Mover:
    """A queue of raises whose bytes are on their way.

    Args:
        arena: Where the bytes go.
        store: Where they come from.
        chunk_bytes: Bytes of one chunk.
        lane: How they travel; None: as the arena's device does it best.
        bytes_per_second: Of raises that are not urgent, at most; None = as fast as they go.
        readers: Threads that read from disk; 0 = the polling thread, in its turn.
        clock: Seconds, for the budget.

    Attributes:
        copies: Copies made; neighbours on the host are one.
        copied_bytes: Bytes of these.
    """

    def __init__(
        self,
        arena: Arena,
        store: HostPlaneStore,
        chunk_bytes: int = CHUNK_BYTES,
        *,
        lane: Lane | None = None,
        bytes_per_second: float | None = None,
        readers: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._page_bytes = store, arena.page_bytes
        self._chunk_pages = max(1, chunk_bytes // arena.page_bytes)
        self._lane = lane or lane_of(arena, self._chunk_pages)
        self._budget = None if bytes_per_second is None else _Budget(bytes_per_second, clock)
        self._readers = ThreadPoolExecutor(readers, "pw-mover") if readers else None
        self._tasks: dict[int, _Task] = {}  # by block, in the order of `start`
        self._fresh: dict[bool, list[_Part]] = {True: [], False: []}  # urgent or not, not sorted
        self._queues: dict[bool, deque[_Part]] = {True: deque(), False: deque()}
        self._unread: deque[_Part] = deque()
        self._reading = 0  # parts read or being read, and not yet copied
        self._flying: deque[_Chunk] = deque()
        self._failed: list[tuple[int, Exception]] = []
        self._fence: Any = None
        self.copies = self.copied_bytes = 0

    @property
    def pending(self) -> int:
        """Raises that have neither landed nor failed."""
        return len(self._tasks)

    def start(self, move: Raise, *, urgent: bool = False) -> None:
        """Queue the copies of a raise. Returns at once.

        Args:
            move: What to copy. Its pages are free of readers that are asked from now on.
            urgent: Somebody waits for it: it goes first, and does not count for the budget.
        """
        if self._fence is None:
            self._fence = self._lane.fence()
        pages = move.pages
        task = self._tasks[move.index] = _Task(move, len(pages))
        for part in self._store.parts(move.index, move.from_bits, move.to_bits):
            mine = pages[part.first : part.first + part.count]
            queued = _Part(task, mine, part.from_bits, self._fence, part.place)
            if part.place is not None:
                queued.source = self._store.view(part.place, part.count)
            elif urgent:
                self._unread.appendleft(queued)
            else:
                self._unread.append(queued)
            self._fresh[urgent].append(queued)

    def poll(self) -> list[int]:
        """Move on and tell which blocks have landed. Never waits for a copy.

        On a lane that copies in the call: by one chunk.
        """
        return self._move_on(hurry=False)

    def take_failed(self) -> list[tuple[int, Exception]]:
        """Blocks whose bytes cannot be read, an `OSError` or a `StoreError` each, since the last
        call. Nothing writes to the pages of their raises any more.
        """
        failed, self._failed = self._failed, []
        return failed

    def wait(self) -> list[int]:
        """Finish all copies, whatever the budget says; blocks landed, in order. Stalls."""
        landed: list[int] = []
        while self._tasks:
            landed += self._move_on(hurry=True)
            if self._flying:
                self._lane.wait(self._flying[0].ticket)
            else:
                wait(part.read for queue in self._queues.values() for part in queue if part.read)
        return landed

    def drop(self) -> list[int]:
        """Give all copies up; blocks whose pages nothing writes to any more, in order of `start`.

        Waits for the chunks under way at most.
        """
        if self._flying:
            self._lane.wait(self._flying[-1].ticket)
        for part in self._unread:
            if part.read is not None:
                part.read.cancel()
        dropped = list(self._tasks)
        dropped += [index for index, _ in self._failed if index not in self._tasks]
        for parts in (*self._fresh.values(), *self._queues.values(), self._unread, self._flying):
            parts.clear()  # type: ignore[attr-defined]
        self._tasks.clear()
        self._failed.clear()
        self._reading = 0
        self._fence = None
        return dropped

    # -- inside ------------------------------------------------------------------------------

    def _move_on(self, *, hurry: bool) -> list[int]:
        self._sort_fresh()
        self._read_ahead()
        landed = self._retire()
        while len(self._flying) < self._lane.depth:
            chunk = self._next_chunk(urgent=True)
            if not chunk and (hurry or self._budget is None or self._budget.open()):
                chunk = self._next_chunk(urgent=False)
                if chunk and self._budget is not None:
                    self._budget.take(sum(count for _, count in chunk) * self._page_bytes)
            if not chunk:
                break
            self._submit(chunk)
        return landed + self._retire()

    def _sort_fresh(self) -> None:
        """Close the batch of raises started since the last call."""
        for urgent, parts in self._fresh.items():
            parts.sort(key=lambda part: (part.place is None, part.place or (0, 0)))
            self._queues[urgent] += parts
            parts.clear()
        self._fence = None

    def _next_chunk(self, *, urgent: bool) -> list[tuple[_Part, int]]:
        """Parts to copy next, and how many pages of each. A part that fits is not cut."""
        queue, room = self._queues[urgent], self._chunk_pages
        chunk: list[tuple[_Part, int]] = []
        while queue and room:
            part = queue[0]
            if part.task.error is not None or not self._at_hand(part):
                if part.task.error is None:
                    break  # its bytes are being read
                queue.popleft()
                continue
            left = len(part.pages) - part.done
            if left > room and chunk:
                break
            count = min(left, room)
            chunk.append((part, count))
            room -= count
            if count < left:
                break
            queue.popleft()
        return chunk

    def _submit(self, chunk: list[tuple[_Part, int]]) -> None:
        """Hand a chunk to the lane, neighbours on the host as one run."""
        runs: list[Tensor] = []
        pages: list[int] = []
        start = end = None  # of the last run, if it is in the store: (slab, page)
        flying = _Chunk(None)
        for part, count in chunk:
            assert part.source is not None
            run, place = part.source[part.done : part.done + count], part.place
            if place is not None:
                place = (place[0], place[1] + part.done)
            if start is not None and place == end:
                runs[-1] = self._store.view(start, len(runs[-1]) + count)
            else:
                runs.append(run)
                start = place
            end = None if place is None else (place[0], place[1] + count)
            pages += part.pages[part.done : part.done + count]
            part.done += count
            part.task.flying += count
            flying.shares.append((part.task, count))
            if part.read is not None and part.done == len(part.pages):
                self._reading -= 1
        flying.ticket = self._lane.submit(runs, pages, chunk[-1][0].fence)
        self._flying.append(flying)
        self.copies += len(runs)
        self.copied_bytes += len(pages) * self._page_bytes

    def _retire(self) -> list[int]:
        """Blocks all of whose pages have arrived."""
        landed = []
        while self._flying and self._lane.arrived(self._flying[0].ticket):
            for task, count in self._flying.popleft().shares:
                task.left -= count
                task.flying -= count
                if task.left == 0:
                    landed.append(task.move.index)
                    del self._tasks[task.move.index]
                elif task.error is not None and task.flying == 0:
                    self._report(task)
        return landed

    # -- disk --------------------------------------------------------------------------------

    def _read_ahead(self) -> None:
        """Let the readers work on the parts on disk that come first."""
        if self._readers is None:
            self._unread.clear()  # each is read in its turn
            return
        while self._unread and self._reading < _READ_AHEAD:
            part = self._unread.popleft()
            move = part.task.move
            part.read = self._readers.submit(
                self._store.read, move.index, part.from_bits, move.to_bits
            )
            self._reading += 1

    def _at_hand(self, part: _Part) -> bool:
        """Whether the bytes of a part are on the host; False too if its raise has failed."""
        if part.source is not None:
            return True
        try:
            if part.read is not None:
                if not part.read.done():
                    return False
                part.source = part.read.result()
            elif self._readers is None:
                move = part.task.move
                part.source = self._store.read(move.index, part.from_bits, move.to_bits)
        except (OSError, StoreError) as error:
            if part.read is not None:
                self._reading -= 1
            part.task.error = error
            if part.task.flying == 0:
                self._report(part.task)
            return False
        return part.source is not None

    def _report(self, task: _Task) -> None:
        assert task.error is not None
        self._failed.append((task.move.index, task.error))
        del self._tasks[task.move.index]
