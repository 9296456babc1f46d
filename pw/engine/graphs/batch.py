"""A batch of decoding sequences in the shape of a bucket: what the model asks of its step."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pw.engine.context import PrefillSpan
from pw.engine.graphs.inputs import DecodeInputs
from pw.engine.graphs.tables import DeviceTables
from pw.memory.kv_cache import KvCache
from pw_kernels import joint_attention
from pw_kernels.dispatch import paged_attention, write_kv


class DecodeBatch:
    """Like `StepBatch`, with everything read from the device when the step runs.

    Attributes:
        spans: None of it is prompt.
        live: [1] int32, sequences that are real.
    """

    spans: Sequence[PrefillSpan] = ()

    def __init__(self, inputs: DecodeInputs, tables: DeviceTables, kv: KvCache) -> None:
        self._inputs, self._tables, self._kv = inputs.on_device, tables, kv
        self._selected: list[Tensor] = []  # by group [B, L, M]
        self.live: Tensor | None = self._inputs.live

    def begin(self) -> None:
        """First part of a step: the block tables of its sequences."""
        self._selected = self._tables.select(self._inputs.rows)

    def attend(
        self,
        layer: int,
        q: Tensor,  # [B, Hq, D]
        k: Tensor,  # [B, Hkv, D]
        v: Tensor,  # [B, Hkv, Dv]
        *,
        write: bool,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attention of one layer over the arena (see `pw.models.attention`): [B, Hq, Dv]."""
        group, position = self._kv.place(layer)
        pages, inputs = self._kv.layer_pages(layer), self._inputs
        if write:
            write_kv(k, v, pages.keys, pages.values, inputs.slots[group][position])
        return paged_attention(
            q,
            pages.keys,
            pages.values,
            self._selected[group][:, position],
            inputs.query_start,
            inputs.seq_lens,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            counters=self._kv.counters,
        )

    def attend_rotated(
        self,
        layer: int,
        qkv: Tensor,  # [B, (Hq + 2 Hkv) D]; shared values: [B, (Hq + Hkv) D]
        cos: Tensor,  # [B, R]
        sin: Tensor,  # [B, R]
        *,
        head_size: int,
        norm: Tensor | None,
        epsilon: float,
        shared_values: bool,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Rotate, store and attend (see `pw_kernels.joint_attention`): [B, Hq, D]."""
        group, position = self._kv.place(layer)
        pages, inputs = self._kv.layer_pages(layer), self._inputs
        return joint_attention.attend(
            qkv,
            cos,
            sin,
            pages.keys,
            pages.values,
            inputs.slots[group][position],
            self._selected[group][:, position],
            inputs.query_start,
            inputs.seq_lens,
            head_size=head_size,
            scale=scale,
            norm=norm,
            epsilon=epsilon,
            shared_values=shared_values,
            window=window,
            softcap=softcap,
            counters=self._kv.counters,
        )
