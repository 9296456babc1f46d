"""A table on the host and its copy on the device, at fixed addresses, kept equal by small copies.

Kernels read the device side while steps run, so it changes in stream order only, at the safe
point. What is sent is what was noted: positions and values in one pinned buffer, one copy, one
kernel that puts them in place. Nothing waits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_SLOTS = 4  # pinned buffers in turn: the copy from one has ended long before it comes round again
_ALIGNED = 16  # bytes: a buffer begins where its positions can be read as int64
_MOST = 1 << 16  # entries sent alone, but one in eight at most; beyond, the whole table is sent
STAGING_BYTES = 12 * _MOST  # on the device beside the table, at most


class Mirror:
    """Int32 entries on both sides.

    Args:
        size: Entries.
        device: Where the other side is. On a CPU both sides are the same memory.
        apart: Keep the two sides apart on a CPU too, as on a GPU.

    Attributes:
        host: [size] int32, written by the owner, who then calls `note`.
        device: [size] int32, read by kernels.
        sent_bytes: Sent so far.
    """

    def __init__(self, size: int, device: torch.device, *, apart: bool = False) -> None:
        self.host = torch.full((size,), -1, dtype=torch.int32)
        self.sent_bytes = 0
        self._changed: list[NDArray[np.int64]] = []
        self._cuda = device.type == "cuda"
        if device.type == "cpu" and not apart:
            self.device, self._most = self.host, 0
            return
        self.device = self.host.to(device, copy=True)
        self._most = min(_MOST, size // 8)
        self._staging = torch.empty(12 * self._most, dtype=torch.uint8, device=device)
        slot_bytes = -(-max(4 * size, 12 * self._most) // _ALIGNED) * _ALIGNED
        shape = (_SLOTS, slot_bytes)
        self._slots = torch.empty(shape, dtype=torch.uint8, pin_memory=self._cuda)
        self._arrays = self._slots.numpy(), self.host.numpy()  # the same memory, at less overhead
        self._events: list[Any] = [None] * _SLOTS
        self._turn = 0

    @property
    def bytes(self) -> int:
        """Bytes of the entries on the device; staging is workspace."""
        return self.host.nbytes

    def note(self, positions: NDArray[np.int64]) -> None:
        """Entries that have been written on the host side."""
        if self.device is not self.host and len(positions):
            self._changed.append(positions)

    def publish(self) -> None:
        """Send what has changed, in the order of the current stream."""
        if not self._changed:
            return
        # One that changed twice is sent twice: to find it takes longer than steps do.
        positions = np.concatenate(self._changed)
        self._changed.clear()
        slot = self._slots[self._turn]
        self._wait_for_slot()
        count = len(positions)
        if count > self._most:
            whole = slot[: 4 * len(self.host)].view(torch.int32)
            whole.copy_(self.host)
            self.device.copy_(whole, non_blocking=True)
            self.sent_bytes += whole.nbytes
        else:
            slots, host = self._arrays
            data, size = slots[self._turn], 12 * count
            data[: 8 * count].view(np.int64)[:] = positions
            data[8 * count : size].view(np.int32)[:] = host[positions]
            staged = self._staging[:size]
            staged.copy_(slot[:size], non_blocking=True)
            index, values = staged[: 8 * count].view(torch.int64), staged[8 * count :]
            self.device.index_copy_(0, index, values.view(torch.int32))
            self.sent_bytes += size
        self._note_slot()

    def _wait_for_slot(self) -> None:
        """Let the copy that read this turn's buffer last be over, as it nearly always is."""
        event = self._events[self._turn]
        if event is not None:
            event.synchronize()

    def _note_slot(self) -> None:
        if self._cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self.device.device))
            self._events[self._turn] = event
        self._turn = (self._turn + 1) % _SLOTS
