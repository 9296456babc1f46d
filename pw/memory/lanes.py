"""How a chunk of pages gets from the host into the arena: at once, or on a stream of its own.

A lane knows neither blocks nor queues. It copies what it is given, in the order in which it is
given, and says when each chunk has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from pw.memory.arena import Arena


class Lane(Protocol):
    """Copies chunks in order."""

    depth: int  # chunks under way at most: what an urgent need may have to wait for

    def fence(self) -> Any:
        """A mark behind everything that has been asked to read the arena so far."""

    def submit(self, runs: Sequence[Tensor], pages: list[int], fence: Any) -> Any:
        """Start to copy runs [n, page_bytes] uint8, one after the other, into pages of the arena.

        Args:
            runs: On the host, each in one piece; they stay as they are until the chunk has arrived.
            pages: As many as the runs have together.
            fence: Nothing is written before what was asked to read then has read.

        Returns:
            A ticket for `arrived` and `wait`.
        """

    def arrived(self, ticket: Any) -> bool:
        """Whether a chunk can be read. Never waits."""

    def wait(self, ticket: Any) -> None:
        """Return when a chunk can be read."""


class DirectLane:
    """Copies in the call. On a CPU there is no second engine that copies."""

    depth = 1

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def fence(self) -> None:
        """Who was asked to read has read."""

    def submit(self, runs: Sequence[Tensor], pages: list[int], fence: None) -> None:
        """See `Lane`."""
        start = 0
        for run in runs:
            self._arena.write(pages[start : start + len(run)], run)
            start += len(run)

    def arrived(self, ticket: None) -> bool:
        """See `Lane`."""
        return True

    def wait(self, ticket: None) -> None:
        """See `Lane`."""


class StreamLane:
    """Copies on a CUDA stream of its own, through a staging buffer on the device.

    A run is one copy from pinned memory, as large as it is; one kernel then deals the pages out.
    All buffers are made here: nothing is allocated later, and no call waits but `wait`.

    Args:
        arena: Where pages go.
        chunk_pages: Pages of a chunk at most.
        depth: See `Lane`.
    """

    def __init__(self, arena: Arena, chunk_pages: int, depth: int = 2) -> None:
        device = arena.pages.device
        self.depth = depth
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pages = arena.as_dtype(torch.int64)  # a copy kernel moves 8 bytes a thread
        self._staging = torch.empty(chunk_pages, arena.page_bytes, dtype=torch.uint8, device=device)
        # One row more than chunks under way: a row is written while all others are being read.
        shape = (depth + 1, chunk_pages)
        self._host_ids = torch.zeros(shape, dtype=torch.int64, pin_memory=True)
        self._ids = torch.zeros(shape, dtype=torch.int64, device=device)
        self._row = 0

    def fence(self) -> torch.cuda.Event:
        """See `Lane`. Readers are on the current stream."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def submit(
        self, runs: Sequence[Tensor], pages: list[int], fence: torch.cuda.Event
    ) -> torch.cuda.Event:
        """See `Lane`."""
        count, row = len(pages), self._row
        self._row = (row + 1) % len(self._ids)
        self._host_ids[row, :count] = torch.tensor(pages)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(fence)
            start = 0
            for run in runs:
                self._staging[start : start + len(run)].copy_(run, non_blocking=True)
                start += len(run)
            ids = self._ids[row, :count]
            ids.copy_(self._host_ids[row, :count], non_blocking=True)
            self._pages.index_copy_(0, ids, self._staging[:count].view(torch.int64))
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return event

    def arrived(self, ticket: torch.cuda.Event) -> bool:
        """See `Lane`."""
        return bool(ticket.query())  # type: ignore[no-untyped-call]

    def wait(self, ticket: torch.cuda.Event) -> None:
        """See `Lane`."""
        ticket.synchronize()


def lane_of(arena: Arena, chunk_pages: int) -> Lane:
    """The lane of an arena's device."""
    if arena.pages.device.type == "cuda":
        return StreamLane(arena, chunk_pages)
    return DirectLane(arena)
