"""Block tables of all sequences at a fixed address on the device, followed by small copies.

Axes: R rows (sequences), L layers of a group, M blocks of the longest sequence, B sequences.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pw.memory.kv_cache import KvCache
from pw.memory.mirror import Mirror


class DeviceTables:
    """The block tables of a KV cache as decode steps read them.

    A sequence's table only grows while it is in its row, so what has to be sent is what has been
    added since its last step. Pages that a window has left behind stay in it: they are not read.

    Args:
        kv: The cache.
        device: Where the step runs.
        apart: Keep a copy on a CPU too, as on a GPU.
    """

    def __init__(self, kv: KvCache, device: torch.device, *, apart: bool = False) -> None:
        self._kv = kv
        sizes = [table.size for table in kv.block_tables]
        self._mirror = Mirror(sum(sizes), device, apart=apart)
        self._starts = np.concatenate(([0], np.cumsum(sizes)))
        parts = torch.split(self._mirror.device, sizes)
        self._tables = [
            part.view(table.shape) for part, table in zip(parts, kv.block_tables, strict=True)
        ]
        rows = len(kv.block_tables[0]) if kv.block_tables else 0
        self._opened = np.full(rows, -1, dtype=np.int64)
        self._held = np.zeros((len(sizes), rows), dtype=np.int64)  # blocks sent, by group and row

    def follow(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        """Send what the tables of some rows have gained, in stream order.

        Args:
            rows: [B] rows that take a step.
            positions: [B] position of each one's token.
        """
        anew = rows[self._opened[rows] != self._kv.opened[rows]]
        self._held[:, anew] = 0
        self._opened[anew] = self._kv.opened[anew]
        host = self._mirror.host.numpy()
        for group, table in enumerate(self._kv.block_tables):
            wanted = positions // self._kv.shapes[group].tokens_per_page + 1
            held = self._held[group]
            layers, blocks = table.shape[1:]
            for b in np.nonzero(wanted > held[rows])[0].tolist():
                row, first, end = int(rows[b]), int(held[rows[b]]), int(wanted[b])
                start = self._starts[group] + row * layers * blocks
                places = start + np.arange(layers)[:, None] * blocks + np.arange(first, end)
                host[places] = table[row, :, first:end]
                self._mirror.note(places.reshape(-1))
                held[row] = end
        self._mirror.publish()

    def select(self, rows: Tensor) -> list[Tensor]:
        """The tables [B, L, M] int32 of some rows, by group."""
        return [table.index_select(0, rows) for table in self._tables]
