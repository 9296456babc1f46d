"""Copies planes and LUTs from the host store into arena pages. Never changes committed bits.

On a GPU copies run on a stream of their own in chunks, so that an urgent need waits for one chunk
only. On a CPU there is no second engine that copies: each `poll` moves at most one chunk, so that
raises take several steps there too and the states in between are the same.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from pw.memory.arena import Arena
from pw.memory.host_store import HostPlaneStore
from pw.memory.page_table import Raise

CHUNK_BYTES = 2 << 20


@dataclass
class _Copy:
    index: int
    pages: list[int]
    source: Tensor  # [len(pages), page_bytes] uint8
    last: bool  # the raise has landed with this copy
    done: int = 0  # pages copied (CPU) or handed to the stream (GPU)
    event: torch.cuda.Event | None = None


class Mover:
    """A queue of raises whose bytes are on their way.

    Args:
        arena: Where the bytes go.
        store: Where they come from.
        chunk_bytes: Bytes of one chunk.
    """

    def __init__(self, arena: Arena, store: HostPlaneStore, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._arena, self._store = arena, store
        self._chunk_pages = max(1, chunk_bytes // arena.page_bytes)
        self._queue: deque[_Copy] = deque()
        self._flying: deque[_Copy] = deque()
        self._stream: torch.cuda.Stream | None = None
        if arena.pages.device.type == "cuda":
            self._stream = torch.cuda.Stream(arena.pages.device)  # type: ignore[no-untyped-call]

    @property
    def pending(self) -> int:
        """Raises not yet landed."""
        return sum(copy.last for copy in (*self._flying, *self._queue))

    def start(self, move: Raise) -> None:
        """Queue the copies of a raise. Returns at once.

        Raises:
            OSError, StoreError: The block is on disk and cannot be read; nothing is queued.
        """
        planes = self._store.planes(move.index, move.from_bits, move.to_bits)
        copies = [_Copy(move.index, move.plane_pages, planes, not move.lut_pages)]
        if move.lut_pages:
            lut = self._store.lut(move.index, move.to_bits)
            copies.append(_Copy(move.index, move.lut_pages, lut, True))
        self._queue += copies

    def poll(self) -> list[int]:
        """Move on by one chunk and tell which blocks have landed, in the order of `start`."""
        budget = self._chunk_pages
        while self._queue and budget > 0:
            copy = self._queue[0]
            count = min(budget, len(copy.pages) - copy.done)
            self._copy_chunk(copy, count)
            budget -= count
            if copy.done == len(copy.pages):
                self._flying.append(self._queue.popleft())
        landed = []
        while self._flying:
            event = self._flying[0].event
            if event is not None and not event.query():  # type: ignore[no-untyped-call]
                break
            copy = self._flying.popleft()
            if copy.last:
                landed.append(copy.index)
        return landed

    def wait(self) -> list[int]:
        """Finish all copies; blocks landed, in order. Stalls."""
        landed = []
        while self.pending:
            landed += self.poll()
            if self._stream is not None:
                self._stream.synchronize()
        return landed

    def drop(self) -> list[int]:
        """Give all copies up; blocks whose pages nothing writes to any more, in order of `start`.

        Waits for the chunk on its way at most.
        """
        if self._stream is not None:
            self._stream.synchronize()
        dropped = [copy.index for copy in (*self._flying, *self._queue) if copy.last]
        self._flying.clear()
        self._queue.clear()
        return dropped

    def _copy_chunk(self, copy: _Copy, count: int) -> None:
        pages = copy.pages[copy.done : copy.done + count]
        source = copy.source[copy.done : copy.done + count]
        if self._stream is None:
            self._arena.write(pages, source)
        else:
            # The pages were freed by readers on the compute stream: copy after those.
            self._stream.wait_stream(torch.cuda.current_stream(self._arena.pages.device))
            with torch.cuda.stream(self._stream):
                self._arena.write(pages, source)
                copy.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                copy.event.record(self._stream)
        copy.done += count
