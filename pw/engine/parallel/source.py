"""Planes and LUTs of one rank: whole blocks are read, this rank's part is kept.

A read costs all bytes of the block on every rank; it is made once at the start, and later only for
what a short `--offload-cpu-memory` leaves on disk.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from pw.blocks import BlockKey, ExpertGeometry
from pw.engine.parallel.share import Share
from pw.engine.start.sources import WeightSource
from pw.store.tables import Table
from pw_kernels.bitplane import TILE_WORDS, lut_bytes, plane_bytes
from pw_kernels.slicing import cut_lut, cut_planes


class SharedSource:
    """A `WeightSource` of a part of another's blocks. Tables are those of the whole model.

    Args:
        source: Of the whole model.
        share: What to keep.
    """

    def __init__(self, source: WeightSource, share: Share) -> None:
        self._source, self.share = source, share
        self.path: Path = source.path
        self.model_name: str = source.model_name
        self.artifact_hash: str = source.artifact_hash
        self.min_bits, self.max_bits = source.min_bits, source.max_bits
        self.lut_dtype: torch.dtype = source.lut_dtype
        # Of a part of the rows the same rows need not lie so many bytes apart: held whole.
        self.table_bytes = source.table_bytes if share.placed is not None else None

    @property
    def geometry(self) -> ExpertGeometry:
        """The blocks of this rank."""
        return self.share.geometry

    def read_planes(self, key: BlockKey, first: int, count: int, out: NDArray[np.uint8]) -> None:
        """See `pw.memory.host_store.PlaneSource`."""
        whole = self.share.key(key)
        if self.share.placed is not None:
            self._source.read_planes(whole, first, count, out)
            return
        part = self.share.part(key.module)
        planes = np.empty(count * plane_bytes(part.rows, part.cols), np.uint8)
        self._source.read_planes(whole, first, count, planes)
        words = torch.from_numpy(planes).view(torch.int32).view(count, -1, TILE_WORDS)
        out[:] = cut_planes(words, first, part).contiguous().view(torch.uint8).view(-1).numpy()

    def read_lut(self, key: BlockKey, bits: int, out: NDArray[np.uint8]) -> None:
        """See `pw.memory.host_store.PlaneSource`."""
        whole = self.share.key(key)
        if self.share.placed is not None:
            self._source.read_lut(whole, bits, out)
            return
        part = self.share.part(key.module)
        table = np.empty(lut_bytes(part.rows, bits), np.uint8)
        self._source.read_lut(whole, bits, table)
        lut = torch.from_numpy(table).view(torch.int16).view(-1, 1 << bits)
        out[:] = cut_lut(lut, part).view(torch.uint8).view(-1).numpy()

    def has_table(self, stage: str) -> bool:
        """See `WeightSource`."""
        return self._source.has_table(stage)

    def table(self, stage: str) -> Table:
        """See `WeightSource`."""
        return self._source.table(stage)
