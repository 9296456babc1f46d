"""What the host keeps, what comes from disk, reads that fail, memory that cannot be pinned."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from pw.errors import StoreError
from pw.memory import pinned
from pw.memory.host_store import HostPlaneStore
from support.memory import (
    GEOMETRY,
    MAX_BITS,
    MIN_BITS,
    Memory,
    check_contents,
    contents,
    loaded,
    make_memory,
)


class Log:
    """A source that notes what is read, and fails where told to."""

    def __init__(self, memory: Memory) -> None:
        self.reads: list[tuple[str, int, int]] = []
        self.threads: set[str] = set()
        self.error: Exception | None = None
        self._source = memory.source
        self.geometry = GEOMETRY

    def read_planes(self, key: Any, first: int, count: int, out: Any) -> None:
        self._note("planes", first, count)
        self._source.read_planes(key, first, count, out)

    def read_lut(self, key: Any, bits: int, out: Any) -> None:
        self._note("lut", bits, 1)
        self._source.read_lut(key, bits, out)

    def _note(self, what: str, first: int, count: int) -> None:
        if self.error is not None:
            raise self.error
        self.threads.add(threading.current_thread().name)
        self.reads.append((what, first, count))


def on_disk(**options: Any) -> tuple[Memory, Log]:
    """A memory whose blocks are all on disk, and the log of what is read from there."""
    memory = loaded(host_limit=0, **options)
    log = Log(memory)
    memory.store._source = log  # type: ignore[assignment]
    return memory, log


def raise_to(memory: Memory, index: int, bits: int) -> None:
    memory.mover.start(memory.table.begin_raise(index, bits))
    assert memory.mover.wait() == [index]
    memory.table.commit_raise(index)


def test_only_what_is_asked_for_is_read_from_disk() -> None:
    memory, log = on_disk(base_bits=3)
    assert memory.store.bytes == 0
    raise_to(memory, 0, 3)
    assert log.reads == [("planes", 2, 1)]
    raise_to(memory, 0, 6)
    assert log.reads[1:] == [("planes", p, 1) for p in (3, 4, 5)] + [("lut", 6, 1)]
    memory.table.reduce(0, 5)
    assert log.reads[5:] == [("lut", 5, 1)]
    memory.table.reduce(0, 2)
    assert len(log.reads) == 6  # the base tree needs no read
    assert torch.equal(contents(memory, 0), memory.source.weight(GEOMETRY.key(0), 2))


def test_planes_without_padding_are_one_read() -> None:
    memory, log = on_disk(base_bits=3)
    layout = memory.layouts[0]
    whole = type(layout)(layout.shape, MIN_BITS, MAX_BITS, 3, layout.plane_bytes)
    store = HostPlaneStore(log, (whole, whole), limit_bytes=0)  # type: ignore[arg-type]
    store.read(0, 2, 6)
    assert log.reads == [("planes", 2, 4), ("lut", 6, 1)]


def test_a_limit_keeps_the_lower_widths_of_all_blocks_and_is_never_exceeded() -> None:
    whole = make_memory()
    assert whole.store.bytes == sum(
        (MAX_BITS - MIN_BITS) * layout.plane_pages * layout.page_bytes
        + sum(layout.lut_pages(bits) for bits in range(MIN_BITS, MAX_BITS + 1)) * layout.page_bytes
        for layout in whole.layouts * (GEOMETRY.blocks // 2)
    )
    for limit in (0, 4095, 4096, whole.store.bytes // 2, whole.store.bytes - 1, None):
        store = make_memory(host_limit=limit).store
        assert limit is None or limit - 4 * 4096 < store.bytes <= max(limit, 0)
        held = [
            max(bits for bits in range(MIN_BITS, MAX_BITS + 1) if store._place(index, bits))
            if store._place(index, MIN_BITS)
            else MIN_BITS
            for index in range(GEOMETRY.blocks)
        ]
        assert max(held) - min(held) <= 1
        assert sorted(held, reverse=True) == held


@pytest.mark.parametrize("movable", [(2, 6), (3, 5), (5, 6), (4, 4), (0, 0)])
@pytest.mark.parametrize("limit", [None, 20 * 4096])
def test_first_pages_are_the_same_whatever_is_kept(
    movable: tuple[int, int], limit: int | None
) -> None:
    """And parts below the least width of the policy are not kept."""
    memory = make_memory()
    low = max(movable[0], MIN_BITS)
    widths = [low + index % (max(movable[1], low) - low + 1) for index in range(GEOMETRY.blocks)]
    store = HostPlaneStore(
        memory.source, memory.layouts, movable=movable, limit_bytes=limit, readers=2
    )
    plain = HostPlaneStore(memory.source, memory.layouts, limit_bytes=0)
    for found, expected in zip(store.first_pages(widths), plain.first_pages(widths), strict=True):
        assert torch.equal(found, expected)
    steps = movable[1] - movable[0]
    layouts = memory.layouts * (GEOMETRY.blocks // 2)
    planes = sum(steps * layout.plane_pages for layout in layouts)
    luts = sum(
        layout.lut_pages(bits)
        for layout in layouts
        for bits in (range(movable[0], movable[1] + 1) if steps else ())
    )
    if limit is None:
        assert store.bytes == (planes + luts) * 4096


def test_blocks_that_are_alike_share_one_copy() -> None:
    memory = make_memory()
    store = HostPlaneStore(memory.source, memory.layouts, alike=True)
    assert store.bytes * GEOMETRY.blocks == memory.store.bytes * 2
    ((part,), (other,)) = store.parts(2, 2, 3), store.parts(0, 2, 3)
    assert part.place == other.place
    widths = [3, 3, 5, 3] * (GEOMETRY.blocks // 4)
    pages = list(store.first_pages(widths))
    assert len({page.data_ptr() for page in pages}) == 3
    plain = HostPlaneStore(memory.source, memory.layouts)
    for index, (page, expected) in enumerate(zip(pages, plain.first_pages(widths), strict=True)):
        assert page.shape == expected.shape
        assert index > 1 or torch.equal(page, expected)  # of the blocks that stand for all


def test_readers_read_in_threads_of_their_own() -> None:
    memory, log = on_disk(readers=2)
    for index in range(6):
        memory.mover.start(memory.table.begin_raise(index, 5))
    for index in memory.mover.wait():
        memory.table.commit_raise(index)
    assert all(name.startswith("pw-mover") for name in log.threads)
    check_contents(memory)


@pytest.mark.parametrize("readers", [0, 2])
@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), StoreError("damaged")])
def test_a_failed_read_leaves_the_old_width_valid(error: Exception, readers: int) -> None:
    memory, log = on_disk(base_bits=2, readers=readers)
    raise_to(memory, 4, 5)
    free, before = memory.pool.free_count, contents(memory, 4)
    log.error = error
    with pytest.raises(type(error)):
        memory.table.reduce(4, 4)
    memory.mover.start(memory.table.begin_raise(4, 6))
    assert memory.mover.wait() == []
    assert memory.mover.take_failed() == [(4, error)]
    assert memory.mover.take_failed() == []
    assert memory.mover.pending == 0
    memory.table.cancel_raise(4)
    assert memory.table.commit_raise(4) == 5
    assert memory.pool.free_count == free
    assert torch.equal(contents(memory, 4), before)
    memory.table.check_integrity()
    assert memory.table.reduce(4, 2) > 0  # no read


def test_a_raise_that_fails_half_way_is_told_when_nothing_writes_any_more() -> None:
    """Its first planes are on the host and under way when the read of the others fails."""
    limit = make_memory().store.bytes // 3
    memory = loaded(host_limit=limit)
    log = Log(memory)
    log.error = OSError(5, "Input/output error")
    memory.store._source = log  # type: ignore[assignment]
    free, before = memory.pool.free_count, contents(memory, 0)
    move = memory.table.begin_raise(0, MAX_BITS)
    places = [part.place for part in memory.store.parts(0, MIN_BITS, MAX_BITS)]
    assert places[0] is not None
    assert places[-1] is None
    memory.mover.start(move)
    assert memory.mover.wait() == []
    assert memory.mover.take_failed() == [(0, log.error)]
    memory.table.cancel_raise(0)
    memory.table.commit_raise(0)
    assert memory.pool.free_count == free
    assert torch.equal(contents(memory, 0), before)
    raise_to(memory, 1, 3)  # the queue goes on


def test_memory_that_cannot_be_pinned_is_used_unpinned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pinned, "register", lambda _: False)
    memory = make_memory()
    store = HostPlaneStore(memory.source, memory.layouts, pin=True)
    assert [record.message[:34] for record in caplog.records] == [
        "host memory cannot be pinned, copi"
    ]
    (part,) = store.parts(0, 2, 3)
    (same,) = memory.store.parts(0, 2, 3)
    assert part.place is not None
    assert same.place is not None
    assert torch.equal(
        store.view(part.place, part.count), memory.store.view(same.place, same.count)
    )
    assert torch.equal(store.read(0, 2, 6), memory.store.read(0, 2, 6))


def test_pinned_memory_is_let_go_before_it_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    locked: dict[int, int] = {}

    class Driver:
        @staticmethod
        def cudaHostRegister(address: int, size: int, flags: int) -> int:
            locked[address] = size
            return 0

        @staticmethod
        def cudaHostUnregister(address: int) -> None:
            del locked[address]

    monkeypatch.setattr(torch.cuda, "cudart", Driver)
    slab = pinned.HostSlab(3, 4096, pin=True)
    assert slab.pinned
    assert locked == {slab.pages.data_ptr(): 3 * 4096}
    assert slab.pages.data_ptr() % 4096 == 0
    del slab
    assert locked == {}


def test_slabs_are_cut_at_units(monkeypatch: pytest.MonkeyPatch) -> None:
    from pw.memory import host_store

    monkeypatch.setattr(host_store, "SLAB_BYTES", 5 * 4096)
    memory = loaded()
    assert len(memory.store._slabs) > 3
    assert all(slab.bytes <= 5 * 4096 for slab in memory.store._slabs)
    for index in range(GEOMETRY.blocks):
        memory.mover.start(memory.table.begin_raise(index, MAX_BITS))
    for index in memory.mover.wait():
        memory.table.commit_raise(index)
    check_contents(memory)
    assert memory.store.disk_reads == 0
    assert np.all(memory.table.committed == MAX_BITS)
