"""What the model needs to know of one step beyond its tokens: who is where in the KV cache.

`StepBatch` is made by the runner for each step and passed through the model to attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pw.engine.sequence import Chunk
from pw.memory.kv_cache import KvCache
from pw.memory.kv_layout import GroupBatch
from pw.memory.small_copies import to_device
from pw_kernels.dispatch import paged_attention, write_kv
from pw_kernels.step import rotate_store


@dataclass(frozen=True)
class PrefillSpan:
    """Tokens start..end of the packed batch are part of the prompt of one sequence."""

    start: int
    end: int
    chunk: Chunk


class Batch(Protocol):
    """What the experts function may ask of the batch in hand.

    Attributes:
        spans: Parts that are prompt.
        live: [1] int32, tokens that are real; the rows behind them are padding. None: all are.
    """

    spans: Sequence[PrefillSpan]
    live: Tensor | None


class StepBatch:
    """A packed batch: the tokens of all chunks, one after the other.

    Attributes:
        input_ids: [T] int64.
        positions: [T] int64.
        spans: Parts of the batch that are prompt, for the prompt statistics.
    """

    live: Tensor | None = None

    def __init__(self, chunks: list[Chunk], kv: KvCache, device: torch.device) -> None:
        counts = np.fromiter((chunk.count for chunk in chunks), dtype=np.int64)
        starts = np.fromiter((chunk.start for chunk in chunks), dtype=np.int64)
        ends = np.concatenate(([0], counts.cumsum()))
        token_sequence = np.repeat(np.arange(len(chunks)), counts)
        positions = np.arange(int(ends[-1])) - ends[token_sequence] + starts[token_sequence]
        lengths = starts + counts
        ids = [token for chunk in chunks for token in chunk.token_ids()]
        rows = np.fromiter((chunk.sequence.kv_row for chunk in chunks), dtype=np.int64)
        self.input_ids = to_device(np.array(ids, dtype=np.int64), device)
        self.positions = to_device(positions, device)
        self._query_start = to_device(ends.astype(np.int32), device)
        self._seq_lens = to_device(lengths.astype(np.int32), device)
        self._groups: list[GroupBatch] = kv.batch(
            rows, token_sequence, positions, int(lengths.max())
        )
        self._kv = kv
        self.spans: Sequence[PrefillSpan] = [
            PrefillSpan(int(ends[i]), int(ends[i + 1]), chunk)
            for i, chunk in enumerate(chunks)
            if chunk.is_prompt
        ]

    def attend(
        self,
        layer: int,
        q: Tensor,  # [T, Hq, D]
        k: Tensor,  # [T, Hkv, D]
        v: Tensor,  # [T, Hkv, Dv]
        *,
        write: bool,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attention of one layer over the arena (see `pw.models.attention`): [T, Hq, Dv]."""
        number, position = self._kv.place(layer)
        pages, group = self._kv.layer_pages(layer), self._groups[number]
        if write:
            write_kv(k, v, pages.keys, pages.values, group.slots[position])
        return paged_attention(
            q,
            pages.keys,
            pages.values,
            group.block_tables[position],
            self._query_start,
            self._seq_lens,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            counters=self._kv.counters,
        )

    def attend_rotated(
        self,
        layer: int,
        qkv: Tensor,  # [T, (Hq + 2 Hkv) D]; shared values: [T, (Hq + Hkv) D]
        cos: Tensor,  # [T, R]
        sin: Tensor,  # [T, R]
        *,
        head_size: int,
        norm: Tensor | None,
        epsilon: float,
        shared_values: bool,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Rotate (see `pw_kernels.step.rotate_store`), store, then as `attend`: [T, Hq, D]."""
        number, position = self._kv.place(layer)
        pages, slots = self._kv.layer_pages(layer), self._groups[number].slots[position]
        q = rotate_store(
            qkv,
            cos,
            sin,
            pages.keys,
            pages.values,
            slots,
            head_size=head_size,
            norm=norm,
            epsilon=epsilon,
            shared_values=shared_values,
        )
        return self.attend(
            layer, q, q, q, write=False, scale=scale, window=window, softcap=softcap, sinks=None
        )
