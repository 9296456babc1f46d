"""Mover and host store: chunks, order, what is dropped, what comes from disk, what fails."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pw.errors import StoreError
from pw_kernels.reference import decode_block
from support.memory import GEOMETRY, MAX_BITS, MIN_BITS, Memory, make_memory

LOWEST = np.full(GEOMETRY.blocks, MIN_BITS, dtype=np.int64)


def loaded(**options: Any) -> Memory:
    memory = make_memory(**options)
    memory.table.load(LOWEST)
    return memory


def contents(memory: Memory, index: int) -> torch.Tensor:
    key = GEOMETRY.key(index)
    pages = memory.table.pages_of(GEOMETRY.slot(key.layer), key.module)
    return decode_block(memory.arena.pages, pages, key.expert, torch.bfloat16)


def test_a_poll_moves_one_chunk_and_raises_land_in_order() -> None:
    memory = loaded(chunk_bytes=2 * 4096)
    first, second = memory.table.begin_raise(0, 4), memory.table.begin_raise(1, 3)
    for move in (first, second):
        memory.mover.start(move)
    assert memory.mover.pending == 2
    pages = len(first.pages)
    landed = []
    for poll in range(1, 100):
        landed += memory.mover.poll()
        copied = sum(bool(memory.arena.pages[page].any()) for page in first.pages)
        assert copied <= 2 * poll
        if (0 in landed) != (2 * poll >= pages):
            pytest.fail(f"{pages} pages, landed {landed} after {poll} chunks of two")
        if len(landed) == 2:
            break
    assert landed == [0, 1]
    assert memory.mover.pending == 0
    assert memory.mover.poll() == []


def test_a_raise_without_a_lut_of_its_own_lands_with_its_planes() -> None:
    memory = loaded(base_bits=MAX_BITS)
    move = memory.table.begin_raise(2, MAX_BITS)
    assert not move.lut_pages
    memory.mover.start(move)
    assert memory.mover.pending == 1
    assert memory.mover.wait() == [2]


def test_dropped_copies_write_no_more_and_name_every_block() -> None:
    memory = loaded(chunk_bytes=4096)
    free = memory.pool.free_count
    for index in (3, 1, 5):
        memory.mover.start(memory.table.begin_raise(index, MAX_BITS))
        memory.table.cancel_raise(index)
    memory.mover.poll()
    dropped = memory.mover.drop()
    assert dropped == [3, 1, 5]
    assert memory.mover.pending == 0
    for index in dropped:
        assert memory.table.commit_raise(index) == MIN_BITS
    assert memory.pool.free_count == free
    before = memory.arena.pages.clone()
    assert memory.mover.poll() == memory.mover.wait() == []
    assert torch.equal(memory.arena.pages, before)
    memory.table.check_integrity()


class Log:
    """A source that notes what is read, and fails where told to."""

    def __init__(self, memory: Memory) -> None:
        self.reads: list[tuple[str, int, int]] = []
        self.error: Exception | None = None
        self._source = memory.source
        self.geometry = GEOMETRY

    def read_planes(self, key: Any, first: int, count: int, out: Any) -> None:
        self._note("planes", first, count)
        self._source.read_planes(key, first, count, out)

    def lut(self, key: Any, bits: int) -> torch.Tensor:
        self._note("lut", bits, 1)
        return self._source.lut(key, bits)

    def _note(self, what: str, first: int, count: int) -> None:
        if self.error is not None:
            raise self.error
        self.reads.append((what, first, count))


def on_disk(**options: Any) -> tuple[Memory, Log]:
    """A memory whose blocks are all on disk, and the log of what is read from there."""
    memory = loaded(host_limit=0, **options)
    log = Log(memory)
    memory.store._source = log  # type: ignore[assignment]
    return memory, log


def test_only_what_is_asked_for_is_read_from_disk() -> None:
    memory, log = on_disk(base_bits=3)
    assert memory.store.bytes == 0
    memory.mover.start(memory.table.begin_raise(0, 3))
    assert log.reads == [("planes", 2, 1)]
    assert memory.mover.wait() == [0]
    memory.table.commit_raise(0)
    memory.mover.start(memory.table.begin_raise(0, 6))
    assert log.reads[1:] == [("planes", 3, 3), ("lut", 6, 1)]
    memory.mover.wait()
    memory.table.commit_raise(0)
    memory.table.reduce(0, 5)
    assert log.reads[3:] == [("lut", 5, 1)]
    memory.table.reduce(0, 2)
    assert len(log.reads) == 4  # the base tree needs no read
    assert torch.equal(contents(memory, 0), memory.source.weight(GEOMETRY.key(0), 2))
    assert torch.equal(memory.store.base_luts(0), make_memory(base_bits=3).store.base_luts(0))
    assert log.reads[4:] == [("lut", 2, 1), ("lut", 3, 1)]


def test_host_limit_keeps_whole_blocks_and_counts_their_bytes() -> None:
    whole = make_memory()
    sizes = [whole.layouts[i % 2].stored_bytes for i in range(GEOMETRY.blocks)]
    assert whole.store.bytes == sum(sizes)
    size = sizes[0]
    for limit in (0, size - 1, size, 3 * size, None):
        memory = make_memory(host_limit=limit)
        assert limit is None or memory.store.bytes <= limit
        for index in range(GEOMETRY.blocks):
            for bits in range(MIN_BITS, MAX_BITS):
                assert torch.equal(
                    memory.store.planes(index, bits, MAX_BITS),
                    whole.store.planes(index, bits, MAX_BITS),
                )


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), StoreError("damaged")])
def test_a_failed_read_leaves_the_old_width_valid(error: Exception) -> None:
    memory, log = on_disk(base_bits=2)
    memory.mover.start(memory.table.begin_raise(4, 5))
    memory.mover.wait()
    memory.table.commit_raise(4)
    free, before = memory.pool.free_count, contents(memory, 4)
    log.error = error
    with pytest.raises(type(error)):
        memory.table.reduce(4, 4)
    move = memory.table.begin_raise(4, 6)
    with pytest.raises(type(error)):
        memory.mover.start(move)
    assert memory.mover.pending == 0
    memory.table.cancel_raise(4)
    assert memory.table.commit_raise(4) == 5
    assert memory.pool.free_count == free
    assert torch.equal(contents(memory, 4), before)
    memory.table.check_integrity()
    assert memory.table.reduce(4, 2) > 0  # no read


def test_memory_that_cannot_be_pinned_is_used_unpinned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from pw.memory.host_store import HostPlaneStore

    zeros = torch.zeros

    def no_pins(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("out of memory that can be pinned")
        return zeros(*size, **options)

    monkeypatch.setattr(torch, "zeros", no_pins)
    memory = make_memory()
    store = HostPlaneStore(memory.source, memory.layouts, pin=True)
    assert [record.message[:34] for record in caplog.records] == [
        "host memory cannot be pinned, copi"
    ]
    assert torch.equal(store.planes(0, 0, 3), memory.store.planes(0, 0, 3))
