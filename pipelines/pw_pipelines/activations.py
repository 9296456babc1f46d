"""Hidden states of many batches at one or several layers: in memory, a GPU's if they are made
there, or in a file.

Axes: B windows of a batch, S tokens of a window, H hidden.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from pw_pipelines.gpu_memory import free_bytes

MEMORY_BYTES = 1 << 29  # above this they go to a file
GPU_SHARE = 0.3  # of a GPU's free memory, for the same: writing them takes longer than a layer


def needs_file(
    places: int, batches: list[Tensor], hidden: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether such `Activations` are too many for the memory of the device."""
    room = MEMORY_BYTES
    if device.type == "cuda":
        room = int(GPU_SHARE * free_bytes(device))
    return places * len(batches) * _stride(batches, hidden, dtype) > room


def _stride(batches: list[Tensor], hidden: int, dtype: torch.dtype) -> int:
    """Bytes that the states of one batch take in a file."""
    return max((ids.numel() for ids in batches), default=0) * hidden * dtype.itemsize


class Activations:
    """A table [places, batches] of hidden states.

    Positioned reads and writes, not a mapping: pages of a mapping count as this process's memory.

    Args:
        places: Number of layers whose states are kept at the same time.
        batches: Tokens [B, S] of each batch.
        hidden: H.
        dtype: Of the states.
        device: Where they are made, and kept if they fit there.
        scratch: Folder of the file if they do not; None = the system's for temporary files.
        keep: Use this named file instead, and what an earlier run left in it.
    """

    def __init__(
        self,
        places: int,
        batches: list[Tensor],
        hidden: int,
        dtype: torch.dtype,
        device: torch.device,
        scratch: Path | None,
        keep: Path | None = None,
    ) -> None:
        self._shapes = [(*ids.shape, hidden) for ids in batches]
        self._dtype, self._device = dtype, device
        self._stride = _stride(batches, hidden, dtype)
        self._held: dict[tuple[int, int], Tensor] = {}
        self._file: IO[bytes] | None = None
        if needs_file(places, batches, hidden, dtype, device):
            if keep is not None:
                self._file = os.fdopen(os.open(keep, os.O_RDWR | os.O_CREAT, 0o644), "r+b", 0)
            else:
                self._file = tempfile.TemporaryFile(dir=scratch, buffering=0)  # noqa: SIM115
            weakref.finalize(self, self._file.close)

    def put(self, place: int, batch: int, states: Tensor) -> None:
        """Keep states [B, S, H]."""
        where = self._device if self._file is None else "cpu"
        states = states.detach().to(where, self._dtype).contiguous()
        if self._file is None:
            self._held[place, batch] = states
            return
        left, offset = memoryview(_bytes(states)), self._offset(place, batch)
        while left:
            count = os.pwrite(self._file.fileno(), left, offset)
            left, offset = left[count:], offset + count

    def get(self, place: int, batch: int) -> Tensor:
        """States [B, S, H], on the device or on the CPU; not to be changed."""
        if self._file is None:
            return self._held[place, batch]
        states = torch.empty(self._shapes[batch], dtype=self._dtype)
        left, offset = memoryview(_bytes(states)), self._offset(place, batch)
        while left:
            count = os.preadv(self._file.fileno(), [left], offset)
            if count == 0:
                raise OSError(f"temporary file of hidden states ended at byte {offset}")
            left, offset = left[count:], offset + count
        return states

    def _offset(self, place: int, batch: int) -> int:
        return (place * len(self._shapes) + batch) * self._stride


def _bytes(states: Tensor) -> memoryview:
    return states.view(-1).view(torch.uint8).numpy().data
