"""Random planes and LUTs of a small geometry, and the memory that serves them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pw.blocks import BlockKey, BlockShape, ExpertGeometry
from pw.memory.arena import Arena
from pw.memory.host_store import HostPlaneStore
from pw.memory.layout import BlockLayout
from pw.memory.mover import Mover
from pw.memory.page_table import WeightPageTable
from pw.memory.pool import PagePool
from pw_kernels.bitplane import dequantize, lut_bytes, pack_planes

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

    def lut(self, key: BlockKey, bits: int) -> torch.Tensor:
        return self.luts[key, bits]

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
    pages: int = 400, base_bits: int = 3, host_limit: int | None = None, chunk_bytes: int = 8192
) -> Memory:
    source = RandomPlanes()
    gate_up, down = (
        BlockLayout(shape, MIN_BITS, MAX_BITS, base_bits, 4096)
        for shape in (GEOMETRY.gate_up, GEOMETRY.down)
    )
    arena = Arena(pages, 4096, torch.device("cpu"))
    pool = PagePool(pages)
    store = HostPlaneStore(source, (gate_up, down), host_limit)
    table = WeightPageTable(GEOMETRY, (gate_up, down), arena, pool, store)
    return Memory(
        source, (gate_up, down), arena, pool, store, table, Mover(arena, store, chunk_bytes)
    )
