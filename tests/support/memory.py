"""Random planes and LUTs of a small geometry, and the memory that serves them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pw.blocks import BlockKey, BlockShape, ExpertGeometry
from pw.memory.arena import Arena
from pw.memory.host_store import HostPlaneStore
from pw.memory.lanes import DirectLane, Lane
from pw.memory.layout import BlockLayout
from pw.memory.mover import Mover
from pw.memory.page_table import WeightPageTable
from pw.memory.pool import PagePool
from pw_kernels.bitplane import dequantize, lut_bytes, pack_planes
from pw_kernels.reference import decode_block

GEOMETRY = ExpertGeometry((0, 2), 3, 2, BlockShape(96, 128), BlockShape(64, 48))
MIN_BITS, MAX_BITS = 2, 6


class RandomPlanes:
    """A plane source with random content."""

    geometry = GEOMETRY

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.planes, self.luts = {}, {}
        for key in GEOMETRY.keys():
            shape = GEOMETRY.shape(key.module)
            codes = torch.randint(
                0, 1 << MAX_BITS, (shape.rows, shape.cols), generator=generator, dtype=torch.uint8
            )
            self.planes[key] = pack_planes(codes, MAX_BITS)
            for bits in range(MIN_BITS, MAX_BITS + 1):
                rows = lut_bytes(shape.rows, bits) // (2 << bits)
                self.luts[key, bits] = torch.randn(rows, 1 << bits, generator=generator).bfloat16()

    def read_planes(self, key: BlockKey, first: int, count: int, out: np.ndarray) -> None:
        planes = self.planes[key][first : first + count].contiguous()
        out[:] = planes.view(torch.uint8).flatten().numpy()

    def read_lut(self, key: BlockKey, bits: int, out: np.ndarray) -> None:
        out[:] = self.luts[key, bits].view(torch.uint8).flatten().numpy()

    def weight(self, key: BlockKey, bits: int) -> torch.Tensor:
        """The block dequantized at a width, straight from the source."""
        shape = GEOMETRY.shape(key.module)
        return dequantize(
            self.planes[key][:bits], self.luts[key, bits], shape.rows, shape.cols
        ).float()


@dataclass
class Memory:
    source: RandomPlanes
    layouts: tuple[BlockLayout, BlockLayout]
    arena: Arena
    pool: PagePool
    store: HostPlaneStore
    table: WeightPageTable
    mover: Mover


def make_memory(
    pages: int = 400,
    base_bits: int = 3,
    host_limit: int | None = None,
    chunk_bytes: int = 8192,
    readers: int = 0,
    lane: Callable[[Arena], Lane] | None = DirectLane,
    device: str = "cpu",
    **options: Any,
) -> Memory:
    """An empty arena above random planes; further options are the mover's."""
    source = RandomPlanes()
    gate_up, down = (
        BlockLayout(shape, MIN_BITS, MAX_BITS, base_bits, 4096)
        for shape in (GEOMETRY.gate_up, GEOMETRY.down)
    )
    arena = Arena(pages, 4096, torch.device(device))
    pool = PagePool(pages)
    store = HostPlaneStore(
        source, (gate_up, down), limit_bytes=host_limit, readers=readers, pin=device != "cpu"
    )
    table = WeightPageTable(GEOMETRY, (gate_up, down), arena, pool, store)
    lane_of_mover = None if lane is None else lane(arena)
    mover = Mover(arena, store, chunk_bytes, lane=lane_of_mover, readers=readers, **options)
    return Memory(source, (gate_up, down), arena, pool, store, table, mover)


def loaded(**options: Any) -> Memory:
    """The same with every block at its least width."""
    memory = make_memory(**options)
    memory.table.load(np.full(GEOMETRY.blocks, MIN_BITS, dtype=np.int64))
    return memory


def contents(memory: Memory, index: int) -> torch.Tensor:
    """The weights that a kernel would read for a block now."""
    key = GEOMETRY.key(index)
    pages = memory.table.pages_of(GEOMETRY.slot(key.layer), key.module)
    tensors = {
        name: value.cpu() if isinstance(value, torch.Tensor) else value
        for name, value in vars(pages).items()
    }
    return decode_block(
        memory.arena.pages.cpu(), type(pages)(**tensors), key.expert, torch.bfloat16
    )


def check_contents(memory: Memory) -> None:
    """Every block decodes to the weights of its committed width."""
    memory.table.publish()
    memory.table.check_integrity()
    for index, bits in enumerate(memory.table.committed.tolist()):
        expected = memory.source.weight(GEOMETRY.key(index), bits)
        assert torch.equal(contents(memory, index), expected)


class LateLane:
    """Copies when a chunk is let go, as a stream does some time after it was asked to."""

    def __init__(self, arena: Arena, depth: int = 2) -> None:
        self.depth, self.fences, self.waits = depth, 0, 0
        self.chunks: list[tuple[list[torch.Tensor], list[int], int]] = []
        self.gone = 0
        self._arena = arena

    def fence(self) -> int:
        self.fences += 1
        return self.fences

    def submit(self, runs: Sequence[torch.Tensor], pages: list[int], fence: int) -> int:
        assert sum(map(len, runs)) == len(pages)
        self.chunks.append((list(runs), pages, fence))
        return len(self.chunks)

    def arrived(self, ticket: int) -> bool:
        return ticket <= self.gone

    def wait(self, ticket: int) -> None:
        self.waits += 1
        self.let_go(ticket)

    def let_go(self, count: int) -> None:
        """Carry out the copies of all chunks up to a number."""
        for runs, pages, _ in self.chunks[self.gone : count]:
            self._arena.write(pages, torch.cat(runs))
        self.gone = max(self.gone, count)
