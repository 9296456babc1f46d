"""Host copy of all planes and LUTs, in whole pages, ready to be copied to the device untouched.

When the host budget is short, the blocks that do not fit are read from the artifact each time:
residency then has a third level, the disk. Expert weights never change, so nothing is written
back.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pw.blocks import MODULES, BlockKey, ExpertGeometry
from pw.memory.layout import BlockLayout


class PlaneSource(Protocol):
    """Where planes and LUTs come from: an artifact."""

    @property
    def geometry(self) -> ExpertGeometry:
        """Layers, experts and block shapes."""

    def read_planes(self, key: BlockKey, first: int, count: int, out: NDArray[np.uint8]) -> None:
        """Fill `out` with planes first..first+count-1 of a block, back to back."""

    def lut(self, key: BlockKey, bits: int) -> Tensor:
        """LUT of a width in kernel order: [N padded, 2^bits], two bytes an entry."""


class HostPlaneStore:
    """Planes and LUTs of every block.

    Args:
        source: Where the bytes come from.
        layouts: Page layout of each module, in the order of `MODULES`.
        limit_bytes: Host bytes at most; None = all blocks.
        pin: Pin the memory (asynchronous copies to a GPU need it).
    """

    def __init__(
        self,
        source: PlaneSource,
        layouts: tuple[BlockLayout, BlockLayout],
        limit_bytes: int | None = None,
        pin: bool = False,
    ) -> None:
        self._source = source
        self._geometry = source.geometry
        self._layouts = layouts
        self._pin = pin
        self._resident: dict[int, Tensor] = {}
        self.bytes = 0
        self.disk_reads = 0
        for index in range(self._geometry.blocks):
            size = self._layout(index).stored_bytes
            if limit_bytes is not None and self.bytes + size > limit_bytes:
                continue
            self._resident[index] = self._load(index)
            self.bytes += size

    def planes(self, index: int, first: int, last: int) -> Tensor:
        """Planes first..last-1 of a block as pages: [(last - first) * PP, page_bytes] uint8."""
        layout = self._layout(index)
        return self._block(index)[first * layout.plane_pages : last * layout.plane_pages]

    def base_luts(self, index: int) -> Tensor:
        """The region with the LUTs of the always resident widths: [pages, page_bytes] uint8."""
        layout = self._layout(index)
        start = layout.max_bits * layout.plane_pages
        return self._block(index)[start : start + layout.base_pages]

    def lut(self, index: int, bits: int) -> Tensor:
        """The LUT of a width above the base tree as pages: [pages, page_bytes] uint8."""
        layout = self._layout(index)
        start = layout.lut_start(bits)
        return self._block(index)[start : start + layout.lut_pages(bits)]

    def _layout(self, index: int) -> BlockLayout:
        return self._layouts[index % len(MODULES)]

    def _block(self, index: int) -> Tensor:
        block = self._resident.get(index)
        if block is None:
            self.disk_reads += 1
            block = self._load(index)
        return block

    def _load(self, index: int) -> Tensor:
        """All pages of a block: planes, base LUTs, wide LUTs; [pages, page_bytes] uint8."""
        layout, key = self._layout(index), self._geometry.key(index)
        block = torch.zeros(
            layout.stored_pages, layout.page_bytes, dtype=torch.uint8, pin_memory=self._pin
        )
        flat = block.view(-1)
        planes = torch.empty(layout.max_bits * layout.plane_bytes, dtype=torch.uint8)
        self._source.read_planes(key, 0, layout.max_bits, planes.numpy())
        block[: layout.max_bits * layout.plane_pages].view(layout.max_bits, -1)[
            :, : layout.plane_bytes
        ] = planes.view(layout.max_bits, layout.plane_bytes)
        for bits in range(layout.min_bits, layout.max_bits + 1):
            data = self._source.lut(key, bits).contiguous().view(torch.uint8).flatten()
            start = layout.lut_start(bits) * layout.page_bytes + layout.lut_offset(bits)
            flat[start : start + data.numel()] = data
        return block
