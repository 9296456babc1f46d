"""Decode steps by bucket: the least one that holds the batch runs, the rest of it is padding.

Nothing of a step is part of its graph: tokens, positions, pages, lengths and how many sequences
there are come from fixed addresses, bits and pages of the experts from the weight page table. So a
graph stays right while bits change, requests come and go, and sequences grow.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pw.engine.experts import RoutedExperts
from pw.engine.graphs.batch import DecodeBatch
from pw.engine.graphs.capture import MakeGraph, Step
from pw.engine.graphs.inputs import DecodeInputs
from pw.engine.graphs.tables import DeviceTables
from pw.engine.sequence import Chunk
from pw.memory.kv_cache import KvCache
from pw.models.beside import opened
from pw.models.skeleton import Skeleton


def bucket_sizes(most: int) -> list[int]:
    """Batch sizes with a step of their own: 1, 2, 4, ... and `most`."""
    sizes = [1 << power for power in range(most.bit_length())]
    return sizes if sizes[-1] == most else [*sizes, most]


@dataclass(frozen=True)
class Bucket:
    """The step of one batch size; `run` repeats it on what `inputs` holds."""

    inputs: DecodeInputs
    batch: DecodeBatch
    run: Step


class DecodeSteps:
    """Runs decode steps in fixed shapes.

    Args:
        skeleton: The model, with `experts` bound.
        experts: What its experts modules call.
        kv: The cache.
        most: Sequences of a step at most.
        make: Turns a step into what runs it: `capture.eager`, or a `capture.Capture`.

    Raises:
        Exception: Whatever a step raises that cannot run or be captured in this shape.
    """

    def __init__(
        self, skeleton: Skeleton, experts: RoutedExperts, kv: KvCache, most: int, make: MakeGraph
    ) -> None:
        self._skeleton, self._kv = skeleton, kv
        self._tables = DeviceTables(kv, skeleton.device)
        self._sizes = bucket_sizes(most)
        # Largest first: what it needs of the pool is enough for the others.
        made = {size: self._make(size, experts, make) for size in reversed(self._sizes)}
        self._buckets = [made[size] for size in self._sizes]

    @property
    def sizes(self) -> Sequence[int]:
        """Sequences of each bucket, ascending."""
        return self._sizes

    def bucket(self, count: int) -> Bucket:
        """The least one that holds so many sequences."""
        return self._buckets[bisect.bisect_left(self._sizes, count)]

    def takes(self, chunk: Chunk) -> bool:
        """Whether a chunk is one token of an output and asks for nothing but the next."""
        if chunk.count != 1 or not chunk.samples:
            return False
        return not chunk.is_prompt or (
            chunk.sequence.statistics is None and not chunk.scored_targets()
        )

    def run(
        self, chunks: Sequence[Chunk], experts: RoutedExperts, drawn: Tensor | None = None
    ) -> Tensor:
        """Logits [n, V] of n sequences; the next run may overwrite them.

        Args:
            chunks: [n], one token each.
            experts: What the model's experts modules call.
            drawn: See `DecodeInputs.fill`.
        """
        bucket = self.bucket(len(chunks))
        rows = np.array([chunk.sequence.kv_row for chunk in chunks])
        self._tables.follow(rows, np.array([chunk.start for chunk in chunks]))
        bucket.inputs.fill(chunks, drawn)
        experts.batch = bucket.batch
        try:
            return bucket.run()[: len(chunks)]
        finally:
            experts.batch = None

    def release(self) -> None:
        """Let go of the graphs, and of the memory that they hold; nothing runs any more."""
        self._buckets = []

    @torch.inference_mode()
    def _make(self, size: int, experts: RoutedExperts, make: MakeGraph) -> Bucket:
        device = self._skeleton.device
        inputs = DecodeInputs(size, self._kv, device)
        inputs.fill([])  # all padding: what is tried now touches no page and counts nothing
        batch = DecodeBatch(inputs, self._tables, self._kv)
        ids, positions = inputs.on_device.ids, inputs.on_device.positions

        def step() -> Tensor:
            batch.begin()
            with opened(device):
                hidden = self._skeleton.hidden(ids, positions, batch)
            return self._skeleton.logits(hidden)

        experts.batch = batch
        try:
            return Bucket(inputs, batch, make(step))
        finally:
            experts.batch = None
