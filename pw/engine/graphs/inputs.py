"""What changes from one decode step to the next: one buffer on the host, one on the device.

A bucket of B sequences always reads the same addresses and the same shapes. What a step has less
than B is padding: rows behind `live` store nothing, belong to no sequence and have no expert.

Axes: B sequences of the bucket, L layers of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pw.engine.sequence import Chunk
from pw.memory.kv_cache import KvCache

_TURNS = 2  # host buffers in turn: a step may be filled while the one before is on its way


@dataclass(frozen=True)
class _Fields:
    """Views of one flat buffer."""

    ids: Tensor  # [B] int64
    positions: Tensor  # [B] int64
    rows: Tensor  # [B] int64, in the block tables
    slots: list[Tensor]  # by group [L, B] int64, where keys and values go; -1 for nowhere
    query_start: Tensor  # [B + 1] int32: sequence b has query b, padding has none
    seq_lens: Tensor  # [B] int32
    live: Tensor  # [1] int32


class DecodeInputs:
    """The inputs of a bucket.

    Args:
        size: B.
        kv: Tells the layers of each group, and where tokens go.
        device: Where the step runs.

    Attributes:
        on_device: What the step reads.
    """

    def __init__(self, size: int, kv: KvCache, device: torch.device) -> None:
        self._size, self._kv = size, kv
        layers = [table.shape[1] for table in kv.block_tables]
        words = size * (3 + sum(layers)) + size + 1  # the int32 fields take 2 B + 2
        self._buffer = torch.zeros(words, dtype=torch.int64, device=device)
        self.on_device = _fields(self._buffer, size, layers)
        pinned = device.type == "cuda"
        self._hosts = [
            torch.zeros(words, dtype=torch.int64, pin_memory=pinned) for _ in range(_TURNS)
        ]
        self._views = [_fields(host, size, layers) for host in self._hosts]
        self._turn = 0

    def fill(self, chunks: Sequence[Chunk], drawn: Tensor | None = None) -> None:
        """Send a step of at most B sequences, one token each, with one copy in stream order.

        Args:
            chunks: The sequences, [n] in order.
            drawn: [n] int64 on the device, the tokens if the host has not read them; below 0: any.
        """
        self._turn = (self._turn + 1) % _TURNS
        self._write(self._views[self._turn], chunks, known=drawn is None)
        self._buffer.copy_(self._hosts[self._turn], non_blocking=True)
        if drawn is not None:
            torch.clamp(drawn, min=0, out=self.on_device.ids[: len(chunks)])

    def _write(self, to: _Fields, chunks: Sequence[Chunk], *, known: bool) -> None:
        count = len(chunks)
        rows, positions = to.rows.numpy(), to.positions.numpy()
        to.ids.numpy()[:count] = [chunk.token_ids()[0] for chunk in chunks] if known else 0
        rows[:count] = [chunk.sequence.kv_row for chunk in chunks]
        positions[:count] = [chunk.start for chunk in chunks]
        lengths = to.seq_lens.numpy()
        lengths[:count] = positions[:count] + 1
        for values in (to.ids.numpy(), rows, positions, lengths):
            values[count:] = 0
        np.minimum(np.arange(self._size + 1), count, out=to.query_start.numpy())
        to.live.numpy()[0] = count
        for shape, table, slots in zip(
            self._kv.shapes, self._kv.block_tables, to.slots, strict=True
        ):
            block, offset = np.divmod(positions[:count], shape.tokens_per_page)
            pages = table[rows[:count], :, block].T.astype(np.int64)
            slots.numpy()[:, :count] = pages * shape.tokens_per_page + offset
            slots.numpy()[:, count:] = -1


def _fields(flat: Tensor, size: int, layers: Sequence[int]) -> _Fields:
    """Cut a flat int64 buffer: the int64 fields, then the int32 ones."""
    longs = size * (3 + sum(layers))
    ids, positions, rows, *slots = torch.split(
        flat[:longs], [size, size, size, *(size * count for count in layers)]
    )
    ints = flat[longs:].view(torch.int32)
    query_start, seq_lens, live = torch.split(ints, [size + 1, size, 1])
    shaped = [part.view(count, size) for part, count in zip(slots, layers, strict=True)]
    return _Fields(ids, positions, rows, shaped, query_start, seq_lens, live)
