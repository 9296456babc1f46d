"""Host copy of the planes and LUTs that can move, ready to be copied to the device untouched.

Residency has three levels: device, host, disk. The device holds what is served. The host holds
what can come back: a block never falls below the least width of the policy, so planes below it
and LUTs of the base tree are read once, at the start, and not kept. When the host budget is short
the rest is read from the artifact when it is wanted. Expert weights never change, so nothing is
written back.

What a raise to width w copies, plane w - 1 and LUT w, is one *unit*. Units lie by width, then by
block (a block's gate_up beside its down, experts and layers in order):

    width low+1:  block 0 | block 1 | ... | block n-1,  width low+2:  block 0 | ...

because a plan raises many blocks by one plane, and those of one layer are then neighbours. A
short budget keeps the first of them: every raise begins with the lower planes. The lists that
start it hold the LUTs alone of width low, for reductions, where low is above the base tree.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pw.blocks import MODULES, BlockKey, ExpertGeometry
from pw.memory.layout import BlockLayout
from pw.memory.pinned import HostSlab

logger = logging.getLogger(__name__)

SLAB_BYTES = 1 << 28  # a slab is pinned by one thread, in one call
_AHEAD = 2  # jobs of a reader beside the one it works at
_Result = TypeVar("_Result")


class PlaneSource(Protocol):
    """Where planes and LUTs come from: an artifact. Reads may come from several threads."""

    @property
    def geometry(self) -> ExpertGeometry:
        """Layers, experts and block shapes."""

    def read_planes(self, key: BlockKey, first: int, count: int, out: NDArray[np.uint8]) -> None:
        """Fill `out` with planes first..first+count-1 of a block, back to back."""

    def read_lut(self, key: BlockKey, bits: int, out: NDArray[np.uint8]) -> None:
        """Fill `out` with the LUT of a width in kernel order: [N padded, 2^bits] of two bytes."""


@dataclass(frozen=True)
class Part:
    """Pages of a raise that lie together on the host, or on disk.

    Attributes:
        first: First of them among the pages of the raise.
        count: How many.
        place: (slab, page in it); None: on disk, `HostPlaneStore.read` brings them.
        from_bits: Width that they start from.
    """

    first: int
    count: int
    place: tuple[int, int] | None
    from_bits: int


class HostPlaneStore:
    """Planes and LUTs of every block, as far as they can move.

    Args:
        source: Where the bytes come from.
        layouts: Page layout of each module, in the order of `MODULES`.
        movable: Least and most bits that a block may have; None = all that are stored.
        limit_bytes: Host bytes at most; None = everything.
        pin: Pin the memory (asynchronous copies to a GPU need it).
        alike: All blocks of a module hold the same bytes: one copy serves them all.
        readers: Threads that read; 0 = the caller's, in order.

    Attributes:
        bytes: Held on the host.
        disk_reads: Parts and LUTs that were read after the start.
    """

    def __init__(
        self,
        source: PlaneSource,
        layouts: tuple[BlockLayout, BlockLayout],
        *,
        movable: tuple[int, int] | None = None,
        limit_bytes: int | None = None,
        pin: bool = False,
        alike: bool = False,
        readers: int = 0,
    ) -> None:
        self._source, self._geometry, self._layouts = source, source.geometry, layouts
        self._low, self._high = movable or (layouts[0].min_bits, layouts[0].max_bits)
        self._pin, self._alike, self._readers = pin, alike, readers
        self._blocks = len(MODULES) if alike else self._geometry.blocks
        self.disk_reads = 0
        self._slabs: list[HostSlab] = []
        self._places: list[tuple[int, int]] = []  # of units, in their order
        self._fill(self._room(limit_bytes))
        self.bytes = sum(slab.bytes for slab in self._slabs)

    # -- what a raise copies -----------------------------------------------------------------

    def parts(self, index: int, from_bits: int, to_bits: int) -> list[Part]:
        """Where the pages of a raise are: planes from..to-1, then LUT `to`, in this order."""
        layout = self._layout(index)
        size = layout.plane_pages
        parts: list[Part] = []
        for bits in range(from_bits + 1, to_bits + 1):
            place, first = self._place(index, bits), (bits - 1 - from_bits) * size
            if place is None:  # and so are all wider ones
                count = (to_bits - bits + 1) * size + layout.lut_pages(to_bits)
                return [*parts, Part(first, count, None, bits - 1)]
            wide = layout.lut_pages(to_bits) if bits == to_bits else 0
            parts.append(Part(first, size + wide, place, bits - 1))
        return parts

    def view(self, place: tuple[int, int], count: int) -> Tensor:
        """Pages [count, page_bytes] from a place on."""
        slab, start = place
        return self._slabs[slab].pages[start : start + count]

    def read(self, index: int, from_bits: int, to_bits: int) -> Tensor:
        """Planes from..to-1 and LUT `to` from disk: [pages, page_bytes] uint8. Any thread may.

        Raises:
            OSError: They cannot be read.
            StoreError: They are damaged.
        """
        layout = self._layout(index)
        self.disk_reads += 1
        planes = (to_bits - from_bits) * layout.plane_pages
        pages = self._scratch(planes + layout.lut_pages(to_bits))
        self._read_planes(index, from_bits, to_bits, pages)
        if layout.lut_pages(to_bits):
            self._read_luts(index, to_bits, to_bits, pages[planes:])
        return pages

    def on_disk(self, index: int, bits: int) -> bool:
        """Whether `lut` reads this one from disk."""
        return self._layout(index).lut_pages(bits) > 0 and self._place(index, bits) is None

    def lut(self, index: int, bits: int) -> Tensor:
        """The LUT of a width above the base tree as pages: [pages, page_bytes] uint8.

        Raises:
            OSError, StoreError: As for `read`.
        """
        layout = self._layout(index)
        count, place = layout.lut_pages(bits), self._place(index, bits)
        if place is not None:
            slab, start = place
            planes = layout.plane_pages if bits > self._low else 0
            return self.view((slab, start + planes), count)
        self.disk_reads += 1
        pages = self._scratch(count)
        self._read_luts(index, bits, bits, pages)
        return pages

    # -- the start ---------------------------------------------------------------------------

    def first_pages(self, widths: Iterable[int]) -> Iterator[Tensor]:
        """Everything that each block brings to the device at its first width, in block order.

        Yields:
            [pages, page_bytes] uint8: planes, the base region, the wide LUT if there is one.

        Raises:
            OSError, StoreError: As for `read`.
        """
        if not self._alike:
            jobs = (partial(self._first, index, bits) for index, bits in enumerate(widths))
            yield from _ordered(jobs, self._readers)
            return
        made: dict[tuple[int, int], Tensor] = {}  # by module and width
        for index, bits in enumerate(widths):
            what = index % len(MODULES), bits
            if what not in made:
                made[what] = self._first(index, bits)
            yield made[what]

    def _first(self, index: int, bits: int) -> Tensor:
        layout = self._layout(index)
        pages = self._scratch(layout.resident_pages(bits))
        size = layout.plane_pages
        held = min(bits, self._low)
        while held < bits and self._place(index, held + 1) is not None:
            held += 1
        below = min(bits, self._low)
        if below:
            self._read_planes(index, 0, below, pages)
        for width in range(below + 1, held + 1):
            place = self._place(index, width)
            assert place is not None
            pages[(width - 1) * size : width * size] = self.view(place, size)
        if held < bits:
            self._read_planes(index, held, bits, pages[held * size :])
        base = pages[bits * size :]
        self._read_luts(index, layout.min_bits, layout.base_bits, base)
        if layout.lut_pages(bits):
            self._read_luts(index, bits, bits, base[layout.base_pages :])
        return pages

    def _room(self, limit_bytes: int | None) -> int:
        """How many units fit, in their order."""
        sizes = np.array([self._unit_pages(order) for order in range(self._units)], np.int64)
        ends = sizes.cumsum() * self._layouts[0].page_bytes
        if limit_bytes is None:
            return len(ends)
        return int(np.searchsorted(ends, limit_bytes, side="right"))

    def _fill(self, units: int) -> None:
        """Lay out the first units in slabs, then pin and read them slab by slab."""
        page_bytes = self._layouts[0].page_bytes
        slabs: list[list[int]] = []  # orders of their units
        start = 0
        for order in range(units):
            size = self._unit_pages(order) * page_bytes
            if not size:
                self._places.append((0, 0))  # nobody looks there
                continue
            if not slabs or start + size > SLAB_BYTES:
                slabs.append([])
                start = 0
            slabs[-1].append(order)
            self._places.append((len(slabs) - 1, start // page_bytes))
            start += size
        self._slabs.extend(_ordered((partial(self._read_slab, s) for s in slabs), self._readers))
        if self._pin and not all(slab.pinned for slab in self._slabs):
            logger.warning("host memory cannot be pinned, copies to the device will be slower")

    def _read_slab(self, orders: list[int]) -> HostSlab:
        pages = [self._unit_pages(order) for order in orders]
        slab = HostSlab(sum(pages), self._layouts[0].page_bytes, pin=self._pin)
        for order, start in zip(orders, np.cumsum([0, *pages[:-1]]).tolist(), strict=True):
            bits, index = divmod(order, self._blocks)
            bits += self._low
            unit = slab.pages[start : start + self._unit_pages(order)]
            if bits > self._low:
                self._read_planes(index, bits - 1, bits, unit)
                unit = unit[self._layout(index).plane_pages :]
            if len(unit):
                self._read_luts(index, bits, bits, unit)
        return slab

    # -- units -------------------------------------------------------------------------------

    @property
    def _units(self) -> int:
        return (self._high - self._low + 1) * self._blocks if self._high > self._low else 0

    def _unit_pages(self, order: int) -> int:
        bits, index = divmod(order, self._blocks)
        layout = self._layout(index)
        return layout.lut_pages(self._low + bits) + (layout.plane_pages if bits else 0)

    def _place(self, index: int, bits: int) -> tuple[int, int] | None:
        """Where the unit of a width begins on the host; None: on disk."""
        if not self._low <= bits <= self._high:
            return None
        order = (bits - self._low) * self._blocks + index % self._blocks
        return self._places[order] if order < len(self._places) else None

    def _layout(self, index: int) -> BlockLayout:
        return self._layouts[index % len(MODULES)]

    # -- reading -----------------------------------------------------------------------------

    def _read_planes(self, index: int, first: int, last: int, pages: Tensor) -> None:
        """Fill the first pages of `pages` with planes first..last-1, with one read if it can."""
        layout, key = self._layout(index), self._geometry.key(index)
        size, used = layout.plane_pages * layout.page_bytes, layout.plane_bytes
        flat: NDArray[np.uint8] = pages.view(-1).numpy()
        if used == size:
            self._source.read_planes(key, first, last - first, flat[: (last - first) * size])
            return
        for plane in range(last - first):
            target = flat[plane * size : plane * size + used]
            self._source.read_planes(key, first + plane, 1, target)

    def _read_luts(self, index: int, low: int, high: int, region: Tensor) -> None:
        """Fill a region with the LUTs of widths low..high."""
        layout, key = self._layout(index), self._geometry.key(index)
        flat: NDArray[np.uint8] = region.view(-1).numpy()
        for bits in range(low, high + 1):
            start, size = layout.lut_offset(bits), layout.lut_bytes(bits)
            if layout.table_bytes is None:
                self._source.read_lut(key, bits, flat[start : start + size])
                continue
            whole = np.empty(size, dtype=np.uint8)
            self._source.read_lut(key, bits, whole)
            held = min(size, len(flat))  # whole pages, which may hold what is repeated twice
            flat[:held] = whole[:held]

    def _scratch(self, count: int) -> Tensor:
        """Pages that are copied from once: [count, page_bytes] uint8."""
        size = (count, self._layouts[0].page_bytes)
        if self._pin:
            try:
                return torch.zeros(size, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                self._pin = False
                logger.warning("host memory cannot be pinned, copies will be slower: %s", error)
        return torch.zeros(size, dtype=torch.uint8)


def _ordered(jobs: Iterable[Callable[[], _Result]], threads: int) -> Iterator[_Result]:
    """Results of jobs in their order; a bounded number of them is under way."""
    if not threads:
        for job in jobs:
            yield job()
        return
    running: deque[Future[_Result]] = deque()
    with ThreadPoolExecutor(threads, "pw-read") as pool:
        try:
            for job in jobs:
                running.append(pool.submit(job))
                if len(running) > _AHEAD * threads:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            for future in running:
                future.cancel()
