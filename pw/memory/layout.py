"""How the planes and LUTs of a block fill whole pages. Arithmetic only.

Pages of a block on the host, in this order (r = base width):

    plane 0 .. plane max-1        each `plane_pages` pages
    base LUTs min..r              `base_pages` pages together, each LUT at a 512-byte boundary
    LUT r+1, LUT r+2 .. LUT max   each `lut_pages(b)` pages

On the device a block at width b holds planes 0..b-1, the base region, and LUT b when b > r.
The base tree makes a reduction at low widths free of copies; it is as wide as real models can
afford (DESIGN section 6: up to 5 bits) and narrower where rows are short and LUTs dear.

Where rows share their tables (`table_bytes`), a LUT says the same again after so many bytes. Pages
are then held once, and the page table names them again and again: kernels see a whole LUT. There
is no base region: what is saved would go into the tables of narrower widths.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from pw.blocks import BlockShape
from pw.memory.arena import pages_for
from pw_kernels.bitplane import lut_bytes, plane_bytes

MAX_BASE_BITS = 5
MAX_BASE_COST = 0.75  # bits a weight that the base tree may cost, mean over the modules
_LUT_ALIGNMENT = 512


def _align(offset: int) -> int:
    return -(-offset // _LUT_ALIGNMENT) * _LUT_ALIGNMENT


def choose_base_bits(
    shapes: Iterable[BlockShape], min_bits: int, max_bits: int, table_bytes: int | None = None
) -> int:
    """Widest LUT tree min..r, r <= 5, that costs at most 0.75 bits a weight; at least min_bits.

    min_bits - 1, no tree, where rows share their tables.
    """
    if table_bytes is not None:
        return min_bits - 1
    shapes = list(shapes)
    weights = sum(shape.weights for shape in shapes)
    base, cost = min_bits, 0.0
    for bits in range(min_bits, min(max_bits, MAX_BASE_BITS) + 1):
        cost += sum(lut_bytes(shape.rows, bits) for shape in shapes) * 8 / weights
        if cost <= MAX_BASE_COST:
            base = bits
    return base


@dataclass(frozen=True)
class BlockLayout:
    """Pages of the blocks of one module."""

    shape: BlockShape
    min_bits: int
    max_bits: int
    base_bits: int  # r: LUTs up to this width are always resident; min_bits - 1: none is
    page_bytes: int
    table_bytes: int | None = None  # a power of two after which LUTs say the same again

    @cached_property
    def plane_bytes(self) -> int:
        """Bytes of one plane, padding to tiles included."""
        return plane_bytes(self.shape.rows, self.shape.cols)

    @cached_property
    def plane_pages(self) -> int:
        """PP: pages of one plane."""
        return pages_for(self.plane_bytes, self.page_bytes)

    @cached_property
    def base_pages(self) -> int:
        """Pages of the base region."""
        return pages_for(self._tree_bytes, self.page_bytes)

    def lut_bytes(self, bits: int) -> int:
        """Bytes of the LUT of a width, padding to tiles included."""
        return lut_bytes(self.shape.rows, bits)

    def held_lut_bytes(self, bits: int) -> int:
        """Bytes of a LUT that are held; where rows share, the others say the same again."""
        return min(self.lut_bytes(bits), self.table_bytes or self.lut_bytes(bits))

    def lut_pages(self, bits: int) -> int:
        """Pages held of the LUT of a width above the base, 0 for a width in the base."""
        return self._lut_pages[bits]

    @cached_property
    def _lut_pages(self) -> list[int]:
        """`lut_pages` by width: a release asks a thousand times."""
        return [
            0 if bits <= self.base_bits else pages_for(self.held_lut_bytes(bits), self.page_bytes)
            for bits in range(self.max_bits + 1)
        ]

    def lut_places(self, bits: int) -> int:
        """Pages that the region of a width's LUT seems to have; `lut_pages` of them are held."""
        if bits <= self.base_bits:
            return self.base_pages
        return pages_for(self.lut_bytes(bits), self.page_bytes)

    @cached_property
    def max_lut_pages(self) -> int:
        """LP: pages that the widest LUT region seems to have, base included."""
        return max(self.base_pages, self.lut_places(self.max_bits))

    def lut_offset(self, bits: int) -> int:
        """Byte offset of a LUT in its region."""
        if bits > self.base_bits:
            return 0
        offset = 0
        for width in range(self.min_bits, bits):
            offset = _align(offset + lut_bytes(self.shape.rows, width))
        return offset

    def lut_start(self, bits: int) -> int:
        """First page of the region of a LUT among the pages of the block on the host."""
        start = self.max_bits * self.plane_pages
        if bits <= self.base_bits:
            return start
        start += self.base_pages
        return start + sum(self.lut_pages(b) for b in range(self.base_bits + 1, bits))

    @property
    def stored_pages(self) -> int:
        """Pages of everything the host keeps of a block."""
        return self.lut_start(self.max_bits) + (
            self.lut_pages(self.max_bits) if self.max_bits > self.base_bits else self.base_pages
        )

    @property
    def stored_bytes(self) -> int:
        """Bytes of everything the host keeps of a block."""
        return self.stored_pages * self.page_bytes

    def resident_pages(self, bits: int) -> int:
        """Pages on the device at a width."""
        return bits * self.plane_pages + self.base_pages + self.lut_pages(bits)

    def resident_lut_pages(self, bits: int) -> int:
        """Those of them that hold LUTs."""
        return self.base_pages + self.lut_pages(bits)

    def useful_bytes(self, bits: int) -> int:
        """Bytes on the device at a width without padding to pages."""
        wide = self.held_lut_bytes(bits) if bits > self.base_bits else 0
        return bits * self.plane_bytes + self._tree_bytes + wide

    def regions(self) -> list[int]:
        """Bytes of each region that fills whole pages, for the choice of the page size."""
        wide = [self.held_lut_bytes(b) for b in range(self.base_bits + 1, self.max_bits + 1)]
        return [self.plane_bytes] * self.max_bits + [self._tree_bytes, *wide]

    @property
    def _tree_bytes(self) -> int:
        """Bytes of the base region."""
        if self.base_bits < self.min_bits:
            return 0
        return self.lut_offset(self.base_bits) + self.lut_bytes(self.base_bits)
