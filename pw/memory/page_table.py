"""Desired and committed bits of every block, and the pages that hold its planes and LUTs.

The only writer of committed bits. It keeps the books; bytes are copied by the mover (raises) or
by the arena in the order of the current stream (LUTs of reductions, before the next step). All
changes happen at the safe point, between two forward steps:

    reduce        committed bits fall, then the pages of the unread planes are free at once
    begin_raise   pages are taken, state = transfer, the old width is still served
    commit_raise  after the copy's event: committed bits rise, the old LUT's pages are free
    cancel_raise  after the copy's event: the pages taken are free again

The tensors that kernels read (`pages_of`) keep their addresses for life.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pw.blocks import MODULES, ExpertGeometry, Module
from pw.memory.arena import Arena
from pw.memory.host_store import HostPlaneStore
from pw.memory.layout import BlockLayout
from pw.memory.mirror import Mirror
from pw.memory.module_table import ModuleTable
from pw.memory.pool import PagePool
from pw.memory.prefix_cache import PrecisionTag
from pw_kernels.pages import WeightPages


@dataclass(frozen=True)
class Raise:
    """A width on its way up: where the new pages are. Planes first, then the LUT."""

    index: int
    from_bits: int
    to_bits: int
    plane_pages: list[int]
    lut_pages: list[int]

    @property
    def pages(self) -> list[int]:
        """All pages taken, in the order of the copy."""
        return self.plane_pages + self.lut_pages


class WeightPageTable:
    """Committed bits and pages of all blocks. Block index = `ExpertGeometry.index`."""

    def __init__(
        self,
        geometry: ExpertGeometry,
        layouts: tuple[BlockLayout, BlockLayout],
        arena: Arena,
        pool: PagePool,
        store: HostPlaneStore,
    ) -> None:
        self.geometry = geometry
        self.layouts = layouts
        self.min_bits, self.max_bits = layouts[0].min_bits, layouts[0].max_bits
        self._arena, self._pool, self._store = arena, pool, store
        entries = sum(ModuleTable.size(geometry, layout) for layout in layouts)
        self._mirror = Mirror(entries, arena.pages.device)
        gate_up = ModuleTable(geometry, layouts[0], self._mirror, 0)
        self._tables = (gate_up, ModuleTable(geometry, layouts[1], self._mirror, gate_up.end))
        self._mirror.note(np.arange(entries))
        self.committed = np.zeros(geometry.blocks, dtype=np.int64)
        self.desired = np.zeros(geometry.blocks, dtype=np.int64)
        self.in_transfer: dict[int, Raise] = {}
        self._tag: PrecisionTag | None = None  # of the committed bits, once somebody asked
        self._moving_pages = 0
        self._cancelled: set[int] = set()
        self._narrowed: dict[int, tuple[list[int], Tensor]] = {}  # LUTs to be written, and where
        self._plane_pages: list[list[list[int]]] = [[] for _ in range(geometry.blocks)]
        self._base_pages: list[list[int]] = [[] for _ in range(geometry.blocks)]
        self._lut_pages: list[list[int]] = [[] for _ in range(geometry.blocks)]
        widths = range(self.min_bits, self.max_bits + 1)
        self._cost_pages = np.array([[lay.resident_pages(b) for b in widths] for lay in layouts])
        self._lut_cost = np.array([[lay.resident_lut_pages(b) for b in widths] for lay in layouts])
        self._useful = np.array([[lay.useful_bytes(b) for b in widths] for lay in layouts])
        weights = [geometry.shape(module).weights for module in MODULES]
        self._weights = np.tile(np.array(weights, dtype=np.float64), geometry.blocks // 2)

    # -- reading ---------------------------------------------------------------------------

    def pages_of(self, slot: int, module: Module) -> WeightPages:
        """What a kernel reads for the blocks of one MoE layer; addresses never change."""
        table = self._tables[MODULES.index(module)]
        bits, offsets, planes, luts = (tensor[slot] for tensor in table.device)
        shape = table.layout.shape
        return WeightPages(shape.rows, shape.cols, bits, planes, luts, offsets)

    def cost_bytes(self) -> NDArray[np.int64]:
        """Bytes in whole pages of each block at each width: [n, W]."""
        per_module: NDArray[np.int64] = self._cost_pages * self._arena.page_bytes
        return np.tile(per_module, (self.geometry.blocks // len(MODULES), 1))

    def resident_pages(self) -> int:
        """Pages that hold planes and LUTs, those on their way up included."""
        return int(self._pick(self._cost_pages).sum()) + self._moving_pages

    def pages_due(self) -> int:
        """Pages that raises under way give back when they land: their blocks' narrower LUTs."""
        return sum(len(self._lut_pages[index]) for index in self.in_transfer)

    def lut_pages(self) -> int:
        """Pages that hold LUTs of settled widths."""
        return int(self._pick(self._lut_cost).sum())

    def padding_bytes(self) -> int:
        """Bytes that hold nothing in the pages of settled widths."""
        pages = int(self._pick(self._cost_pages).sum())
        return pages * self._arena.page_bytes - int(self._pick(self._useful).sum())

    def mean_bits(self) -> float:
        """Mean committed bits of a routed weight."""
        return float((self.committed * self._weights).sum() / self._weights.sum())

    def mean_bits_desired(self, later: Iterable[tuple[int, int]] = ()) -> float:
        """What `mean_bits` will be when every raise under way has landed.

        Args:
            later: Blocks that will be raised besides, and their widths then.
        """
        desired = self.desired.copy()
        for index, bits in later:
            desired[index] = bits
        return float((desired * self._weights).sum() / self._weights.sum())

    def tag(self) -> PrecisionTag:
        """What KV is marked with that is computed at these widths."""
        if self._tag is None:
            epoch = hashlib.blake2b(self.committed.tobytes(), digest_size=16).digest()
            self._tag = PrecisionTag(self.mean_bits(), int(self.committed.min()), epoch)
        return self._tag

    def layer_bits(self) -> NDArray[np.float64]:
        """Mean committed bits of a routed weight in each MoE layer: [L]."""
        shape = (len(self.geometry.layers), -1)
        weights = self._weights.reshape(shape)
        bits: NDArray[np.float64] = (self.committed.reshape(shape) * weights).sum(1)
        return np.asarray(bits / weights.sum(1))

    @property
    def on_gpu(self) -> bool:
        """Whether kernels read it on a GPU."""
        return self._mirror.device.device.type == "cuda"

    @property
    def table_bytes(self) -> int:
        """Device bytes of the page table itself."""
        return self._mirror.bytes

    def _pick(self, per_width: NDArray[np.int64]) -> NDArray[np.int64]:
        modules = np.arange(self.geometry.blocks) % len(MODULES)
        picked: NDArray[np.int64] = per_width[modules, self.committed - self.min_bits]
        return picked

    # -- changing, at the safe point only ---------------------------------------------------

    def load(self, bits: NDArray[np.int64]) -> None:
        """Bring every block in at its first width. Called once, before the first step."""
        widths = bits.tolist()
        for index, pages in enumerate(self._store.first_pages(widths)):
            width, layout, pool = widths[index], self.layouts[index % 2], self._pool
            planes = pool.take(width * layout.plane_pages, index)
            base = pool.take(layout.base_pages, index)
            wide = pool.take(layout.lut_pages(width), index)
            self._arena.write(planes + base + wide, pages)
            self._base_pages[index], self._lut_pages[index] = base, wide
            self._append_planes(index, planes)
            self.committed[index] = self.desired[index] = width
            self._write_entry(index)
        self.publish()

    def reduce(self, index: int, to_bits: int) -> int:
        """Lower the committed bits of a settled block and free the pages it no longer needs.

        A narrower LUT is written by `publish`.

        Returns:
            Pages freed.

        Raises:
            OSError, StoreError: The LUT of the narrower width cannot be read; nothing has changed.
                Never at widths of the base tree.
        """
        from_bits, layout = int(self.committed[index]), self.layouts[index % 2]
        if index in self.in_transfer:
            raise AssertionError(f"block {index} is in transfer")
        if not self.min_bits <= to_bits < from_bits:
            raise AssertionError(f"block {index}: cannot reduce {from_bits} to {to_bits}")
        region = self._lut_pages[index]
        keep = layout.lut_pages(to_bits)
        if keep:
            self._narrowed[index] = region[:keep], self._store.lut(index, to_bits)
        else:
            self._narrowed.pop(index, None)
        freed = region[keep:]
        self._lut_pages[index] = region[:keep]
        for pages in self._plane_pages[index][to_bits:]:
            freed = freed + pages
        del self._plane_pages[index][to_bits:]
        self.committed[index] = self.desired[index] = to_bits
        self._write_entry(index)
        self._pool.give_back(freed, index)
        return len(freed)

    def begin_raise(self, index: int, to_bits: int) -> Raise:
        """Take the pages that a higher width needs; the old width is served until the commit."""
        from_bits, layout = int(self.committed[index]), self.layouts[index % 2]
        if index in self.in_transfer:
            raise AssertionError(f"block {index} is in transfer")
        if not from_bits < to_bits <= self.max_bits:
            raise AssertionError(f"block {index}: cannot raise {from_bits} to {to_bits}")
        pages = self._pool.take(self.raise_pages(index, to_bits), index)
        split = (to_bits - from_bits) * layout.plane_pages
        move = Raise(index, from_bits, to_bits, pages[:split], pages[split:])
        self.in_transfer[index] = move
        self._moving_pages += len(pages)
        self.desired[index] = to_bits
        return move

    def raise_pages(self, index: int, to_bits: int) -> int:
        """Pages that a raise takes while it is under way (the old LUT stays until the commit)."""
        layout = self.layouts[index % 2]
        planes = (to_bits - int(self.committed[index])) * layout.plane_pages
        return planes + layout.lut_pages(to_bits)

    def commit_raise(self, index: int) -> int:
        """Serve the higher width, or give its pages back if the raise was cancelled.

        Returns:
            Committed bits of the block now.
        """
        move = self.in_transfer.pop(index)
        self._moving_pages -= len(move.pages)
        if index in self._cancelled:
            self._cancelled.discard(index)
            self._pool.give_back(move.pages, index)
            self.desired[index] = self.committed[index]
            return int(self.committed[index])
        old = self._lut_pages[index]
        self._narrowed.pop(index, None)
        self._append_planes(index, move.plane_pages)
        self._lut_pages[index] = move.lut_pages
        self.committed[index] = move.to_bits
        self._write_entry(index)
        self._pool.give_back(old, index)
        return move.to_bits

    def cancel_raise(self, index: int) -> None:
        """Have the pages of a raise given back, at its `commit_raise`, instead of served."""
        if index in self.in_transfer:
            self._cancelled.add(index)
            self.desired[index] = self.committed[index]

    def label_pages(self, labels: NDArray[np.uint8], *, lut: int, moving: int) -> None:
        """Note in `labels` [P] what each page of a block holds.

        A plane's page gets the number of the plane, any other the label `lut`, and what a raise
        has taken the label `moving`. Pages of other owners stay as they are.
        """
        owner = self._pool.owner
        labels[(owner >= 0) & (owner < self.geometry.blocks)] = lut
        for table in self._tables:
            for plane, pages in enumerate(table.planes.numpy().swapaxes(0, 2)):  # [B, E, L, PP]
                labels[pages[pages >= 0]] = plane
        for move in self.in_transfer.values():
            labels[move.pages] = moving

    def publish(self) -> None:
        """Send changed entries to the device in stream order, with one small copy.

        Before them, narrower LUTs over wider ones, all together: no kernel reads in between.
        """
        if self._narrowed:
            self._arena.write_all(list(self._narrowed.values()))
            self._narrowed.clear()
        self._mirror.publish()

    def _append_planes(self, index: int, pages: list[int]) -> None:
        size = self.layouts[index % 2].plane_pages
        self._plane_pages[index] += [pages[i : i + size] for i in range(0, len(pages), size)]

    def _entry(self, index: int) -> tuple[int, int, int, list[list[int]], list[int]]:
        """Slot, expert, width, pages of the planes, pages of the LUT region in use."""
        slot, expert = divmod(index // 2, self.geometry.experts)
        region = self._lut_pages[index] or self._base_pages[index]
        return slot, expert, int(self.committed[index]), self._plane_pages[index], region

    def _write_entry(self, index: int) -> None:
        self._tag = None
        self._tables[index % 2].write(*self._entry(index))

    # -- checking ---------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Committed bits never exceed resident planes; each block owns exactly its pages.

        Raises:
            AssertionError: An invariant of DESIGN section 6 does not hold.
        """
        owned = 0
        for index in range(self.geometry.blocks):
            layout, bits = self.layouts[index % 2], int(self.committed[index])
            planes = self._plane_pages[index]
            if len(planes) != bits or any(len(p) != layout.plane_pages for p in planes):
                raise AssertionError(f"{self.geometry.key(index)}: {len(planes)} planes, {bits}")
            if len(self._lut_pages[index]) != layout.lut_pages(bits):
                raise AssertionError(f"{self.geometry.key(index)}: wrong LUT for width {bits}")
            pages = [page for plane in planes for page in plane]
            pages += self._base_pages[index] + self._lut_pages[index]
            if index in self.in_transfer:
                pages += self.in_transfer[index].pages
            if not (self._pool.owner[pages] == index).all() or len(set(pages)) != len(pages):
                raise AssertionError(f"{self.geometry.key(index)}: pages of another owner")
            owned += len(pages)
            if not self._tables[index % 2].holds(*self._entry(index)):
                raise AssertionError(f"{self.geometry.key(index)}: table and books disagree")
        if owned != self.resident_pages():
            raise AssertionError(f"{owned} pages owned by blocks, {self.resident_pages()} counted")
        mine = (self._pool.owner >= 0) & (self._pool.owner < self.geometry.blocks)
        if int(mine.sum()) != owned:
            raise AssertionError(
                f"{int(mine.sum())} weight pages in the pool, {owned} in the table"
            )
