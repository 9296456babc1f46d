"""Host copy of all planes and LUTs, in whole pages, ready to be copied to the device untouched.

When the host budget is short, the blocks that do not fit are read from the artifact each time,
only the planes and LUTs asked for: residency then has a third level, the disk. Expert weights
never change, so nothing is written back.
"""

from __future__ import annotations

import logging
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pw.blocks import MODULES, BlockKey, ExpertGeometry
from pw.memory.layout import BlockLayout

logger = logging.getLogger(__name__)


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
        alike: All blocks of a module hold the same bytes: one copy serves them all.
    """

    def __init__(
        self,
        source: PlaneSource,
        layouts: tuple[BlockLayout, BlockLayout],
        limit_bytes: int | None = None,
        pin: bool = False,
        alike: bool = False,
    ) -> None:
        self._source = source
        self._geometry = source.geometry
        self._layouts = layouts
        self._pin = pin
        self._resident: dict[int, Tensor] = {}
        self.bytes = 0
        self.disk_reads = 0
        for index in range(self._geometry.blocks):
            if alike and index >= len(MODULES):
                self._resident[index] = self._resident[index % len(MODULES)]
                continue
            size = self._layout(index).stored_bytes
            if limit_bytes is None or self.bytes + size <= limit_bytes:
                self._resident[index] = self._load(index)
                self.bytes += size

    def planes(self, index: int, first: int, last: int) -> Tensor:
        """Planes first..last-1 of a block as pages: [(last - first) * PP, page_bytes] uint8.

        Raises:
            OSError: The block is on disk and cannot be read.
            StoreError: The block is on disk and damaged.
        """
        size = self._layout(index).plane_pages
        block = self._resident.get(index)
        if block is not None:
            return block[first * size : last * size]
        self.disk_reads += 1
        pages = self._pages((last - first) * size)
        self._read_planes(index, first, last, pages)
        return pages

    def base_luts(self, index: int) -> Tensor:
        """The region with the LUTs of the always resident widths: [pages, page_bytes] uint8.

        Raises:
            OSError, StoreError: As for `planes`.
        """
        layout = self._layout(index)
        return self._region(index, layout.min_bits, layout.base_bits, layout.base_pages)

    def lut(self, index: int, bits: int) -> Tensor:
        """The LUT of a width above the base tree as pages: [pages, page_bytes] uint8.

        Raises:
            OSError, StoreError: As for `planes`.
        """
        return self._region(index, bits, bits, self._layout(index).lut_pages(bits))

    def _region(self, index: int, low: int, high: int, count: int) -> Tensor:
        """The pages that hold the LUTs low..high together."""
        block, start = self._resident.get(index), self._layout(index).lut_start(low)
        if block is not None:
            return block[start : start + count]
        self.disk_reads += 1
        pages = self._pages(count)
        self._read_luts(index, low, high, pages)
        return pages

    def _layout(self, index: int) -> BlockLayout:
        return self._layouts[index % len(MODULES)]

    def _load(self, index: int) -> Tensor:
        """All pages of a block: planes, base LUTs, wide LUTs; [pages, page_bytes] uint8."""
        layout = self._layout(index)
        block = self._pages(layout.stored_pages)
        self._read_planes(index, 0, layout.max_bits, block)
        start = layout.lut_start(layout.min_bits)
        self._read_luts(index, layout.min_bits, layout.base_bits, block[start:])
        for bits in range(layout.base_bits + 1, layout.max_bits + 1):
            self._read_luts(index, bits, bits, block[layout.lut_start(bits) :])
        return block

    def _read_planes(self, index: int, first: int, last: int, pages: Tensor) -> None:
        """Fill the first pages of `pages` with planes first..last-1."""
        layout, count = self._layout(index), last - first
        planes = torch.empty(count, layout.plane_bytes, dtype=torch.uint8)
        key = self._geometry.key(index)
        self._source.read_planes(key, first, count, planes.view(-1).numpy())
        target = pages[: count * layout.plane_pages].view(count, -1)
        target[:, : layout.plane_bytes] = planes

    def _read_luts(self, index: int, low: int, high: int, region: Tensor) -> None:
        """Fill a region with the LUTs of widths low..high."""
        layout, flat = self._layout(index), region.view(-1)
        for bits in range(low, high + 1):
            lut = self._source.lut(self._geometry.key(index), bits)
            data = lut.contiguous().view(torch.uint8).flatten()
            start = layout.lut_offset(bits)
            flat[start : start + data.numel()] = data

    def _pages(self, count: int) -> Tensor:
        """Empty pages on the host: [count, page_bytes] uint8."""
        size = (count, self._layouts[0].page_bytes)
        if self._pin:
            try:
                return torch.zeros(size, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                self._pin = False
                logger.warning("host memory cannot be pinned, copies will be slower: %s", error)
        return torch.zeros(size, dtype=torch.uint8)
