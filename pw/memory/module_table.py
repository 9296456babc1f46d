"""What kernels read of the blocks of one module: widths, pages of planes, pages of LUTs."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from pw.blocks import ExpertGeometry
from pw.memory.layout import BlockLayout
from pw.memory.mirror import Mirror


class ModuleTable:
    """The entries of one module in a mirror, from a position on.

    Each tensor has a host side, for the books, and a device side, for kernels. Of S layers:

        bits [S, E] | LUT offsets [S, E] | plane pages [S, E, B, PP] | LUT pages [S, E, LP]
    """

    def __init__(
        self, geometry: ExpertGeometry, layout: BlockLayout, mirror: Mirror, start: int
    ) -> None:
        lead = (len(geometry.layers), geometry.experts)
        self.layout, self._mirror = layout, mirror
        self._shapes = (
            lead,
            lead,
            (*lead, layout.max_bits, layout.plane_pages),
            (*lead, layout.max_lut_pages),
        )
        self._starts = [start]
        for shape in self._shapes:
            self._starts.append(self._starts[-1] + math.prod(shape))
        self.bits, self.offsets, self.planes, self.luts = self._cut(mirror.host)
        self.bits.zero_()
        self.offsets.zero_()
        host = (self.bits, self.offsets, self.planes, self.luts)
        self._rows = [side.view(math.prod(lead), -1).numpy() for side in host]  # of each block
        self.device = self._cut(mirror.device)  # bits, offsets, planes, LUTs

    @property
    def end(self) -> int:
        """First position behind it."""
        return self._starts[-1]

    @staticmethod
    def size(geometry: ExpertGeometry, layout: BlockLayout) -> int:
        """Entries that a module takes."""
        each = 2 + layout.max_bits * layout.plane_pages + layout.max_lut_pages
        return len(geometry.layers) * geometry.experts * each

    def write(
        self, slot: int, expert: int, bits: int, planes: list[list[int]], luts: list[int]
    ) -> None:
        """Set a block's width and the pages of its LUT region, and of planes that are new to it."""
        layout, size = self.layout, self.layout.plane_pages
        row = slot * self.bits.shape[1] + expert
        widths, offsets, pages, regions = self._rows
        before, starts = int(widths[row, 0]), self._starts
        widths[row], offsets[row] = bits, layout.lut_offset(bits)
        low, high = sorted((before * size, bits * size))
        pages[row, low:high] = [page for plane in planes[before:] for page in plane] or -1
        first = starts[2] + row * pages.shape[1]
        changed = [np.array(starts[:2]) + row, np.arange(first + low, first + high)]
        if max(before, bits) > layout.base_bits or not before:  # else the region is the base
            places = layout.lut_places(bits)
            repeated = luts if len(luts) == places else np.resize(luts, places)
            regions[row, :places], regions[row, places:] = repeated, -1
            first = starts[3] + row * regions.shape[1]
            changed.append(np.arange(first, first + regions.shape[1]))
        self._mirror.note(np.concatenate(changed))

    def holds(
        self, slot: int, expert: int, bits: int, planes: list[list[int]], luts: list[int]
    ) -> bool:
        """Whether the entry of a block is this one."""
        return (
            int(self.bits[slot, expert]) == bits
            and self.planes[slot, expert, :bits].tolist() == planes
            and self.luts[slot, expert, : len(luts)].tolist() == luts
        )

    def _cut(self, flat: Tensor) -> list[Tensor]:
        """The four tensors as views of one side of the mirror."""
        spans = zip(self._starts, self._starts[1:], self._shapes, strict=False)
        return [flat[start:end].view(shape) for start, end, shape in spans]
