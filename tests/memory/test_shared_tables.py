"""Blocks whose rows share their tables: a page is held once and named again and again."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from pw.blocks import MODULES, BlockShape, ExpertGeometry
from pw.memory.arena import Arena
from pw.memory.budget import layouts_of
from pw.memory.host_store import HostPlaneStore
from pw.memory.lanes import DirectLane
from pw.memory.layout import BlockLayout, choose_base_bits
from pw.memory.mover import Mover
from pw.memory.page_table import WeightPageTable
from pw.memory.pool import PagePool
from pw.models.geometry import KvGeometry, KvLayer
from support.memory import GEOMETRY, MAX_BITS, MIN_BITS, Memory, RandomPlanes, check_contents

PAGE = 4096
WIDTHS = range(MIN_BITS, MAX_BITS + 1)
TABLES = (1024, 4096, 8192)  # less than a page, a page, two pages


class SharedPlanes(RandomPlanes):
    """Random planes whose tables say the same again after so many bytes."""

    def __init__(self, table_bytes: int) -> None:
        super().__init__()
        for (key, bits), lut in self.luts.items():
            period = min(len(lut), table_bytes // (2 << bits))
            self.luts[key, bits] = lut[:period].repeat(len(lut) // period + 1, 1)[: len(lut)]


def make_memory(table_bytes: int, movable: tuple[int, int] | None = None, host: int | None = None):
    source = SharedPlanes(table_bytes)
    base = choose_base_bits([GEOMETRY.gate_up, GEOMETRY.down], MIN_BITS, MAX_BITS, table_bytes)
    gate_up, down = (
        BlockLayout(GEOMETRY.shape(module), MIN_BITS, MAX_BITS, base, PAGE, table_bytes)
        for module in MODULES
    )
    layouts = (gate_up, down)
    arena, pool = Arena(400, PAGE, torch.device("cpu")), PagePool(400)
    store = HostPlaneStore(source, layouts, movable=movable, limit_bytes=host)
    table = WeightPageTable(GEOMETRY, layouts, arena, pool, store)
    mover = Mover(arena, store, 8192, lane=DirectLane(arena))
    return Memory(source, layouts, arena, pool, store, table, mover)


@pytest.mark.parametrize("table_bytes", TABLES)
@pytest.mark.parametrize("host", [None, 1 << 15, 0])
def test_every_transition_leaves_the_weights_of_the_width(table_bytes: int, host: int | None):
    for start, end in itertools.permutations(WIDTHS, 2):
        memory = make_memory(table_bytes, host=host)
        memory.table.load(np.full(GEOMETRY.blocks, start, dtype=np.int64))
        check_contents(memory)
        free = memory.pool.free_count
        for index in (0, 1, GEOMETRY.blocks - 1):
            if end < start:
                memory.table.reduce(index, end)
            else:
                memory.mover.start(memory.table.begin_raise(index, end))
        for landed in memory.mover.wait():
            memory.table.commit_raise(landed)
        check_contents(memory)
        layouts = (memory.layouts[0], memory.layouts[1], memory.layouts[1])
        moved = sum(lay.resident_pages(start) - lay.resident_pages(end) for lay in layouts)
        assert memory.pool.free_count == free + moved
        memory.pool.check_integrity()


def test_a_table_is_held_once_whatever_the_width() -> None:
    layout = BlockLayout(BlockShape(512, 256), 2, 8, 1, PAGE, PAGE)
    whole = BlockLayout(BlockShape(512, 256), 2, 8, 2, PAGE)
    for bits in range(2, 9):
        assert layout.resident_pages(bits) == bits * layout.plane_pages + 1
        assert layout.resident_pages(bits) <= whole.resident_pages(bits)
        assert layout.useful_bytes(bits) == bits * layout.plane_bytes + PAGE
        assert layout.lut_places(bits) == 2 ** (bits - 2)  # what kernels see
    assert layout.base_pages == 0
    assert layout.max_lut_pages == 64
    assert layout.stored_pages == 8 * layout.plane_pages + 7


def test_the_page_table_names_a_page_again() -> None:
    memory = make_memory(PAGE)
    memory.table.load(np.full(GEOMETRY.blocks, MAX_BITS, dtype=np.int64))
    pages = memory.table.pages_of(0, "gate_up").lut_pages[0].tolist()
    assert pages == [pages[0]] * 3  # 96 rows of 128 bytes, one page held
    memory.table.reduce(0, 4)
    assert memory.table.pages_of(0, "gate_up").lut_pages[0].tolist() == [pages[0], -1, -1]


def test_page_size_follows_the_tables_that_are_held() -> None:
    """What is left to choose from once tables are small: the smallest page wastes nothing."""
    geometry = ExpertGeometry((0,), 4, 2, BlockShape(512, 512), BlockShape(512, 256))
    kv = KvGeometry((KvLayer(0, 8, 64, 64, None, 0),))
    gate_up, down = layouts_of(geometry, kv, torch.bfloat16, (2, 7), None, 4096)
    assert gate_up.page_bytes == 4096
    assert gate_up.base_pages == down.base_pages == 0
    assert all(lay.resident_pages(4) * 4096 == lay.useful_bytes(4) for lay in (gate_up, down))
