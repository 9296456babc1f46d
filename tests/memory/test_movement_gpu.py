"""Movement on a GPU: bytes after every transition, no wait and no allocation on the step path."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.device import no_waits
from support.memory import GEOMETRY, MAX_BITS, MIN_BITS, Memory, check_contents, loaded, make_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_gpu(share: float = 1.0, readers: int = 2) -> Memory:
    limit = int(share * make_memory().store.bytes)
    return loaded(device="cuda", host_limit=limit, readers=readers, lane=None, chunk_bytes=3 * 4096)


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_every_transition_between_device_host_and_disk_keeps_the_bytes(share: float) -> None:
    memory = on_gpu(share)
    random = np.random.default_rng(7)
    table, mover = memory.table, memory.mover
    for turn in range(30):
        for index in mover.poll():
            table.commit_raise(index)
        for index in random.permutation(GEOMETRY.blocks)[:4].tolist():
            bits, to = int(table.committed[index]), int(random.integers(MIN_BITS, MAX_BITS + 1))
            if index in table.in_transfer or to == bits:
                continue
            if to < bits:
                table.reduce(index, to)
            elif table.raise_pages(index, to) <= memory.pool.free_count:
                mover.start(table.begin_raise(index, to), urgent=bool(random.integers(2)))
        if turn % 10 == 9:
            for index in list(table.in_transfer):
                table.cancel_raise(index)
            for index in mover.drop():
                table.commit_raise(index)
        check_contents(memory)
    for index in mover.wait():
        table.commit_raise(index)
    check_contents(memory)


def test_a_safe_point_neither_waits_nor_allocates() -> None:
    memory = on_gpu()
    table, mover = memory.table, memory.mover
    assert all(slab.pinned for slab in memory.store._slabs)

    def cycle() -> None:
        for index in range(6):
            mover.start(table.begin_raise(index, MAX_BITS))
        landed: list[int] = []
        while len(landed) < 6:
            landed += mover.poll()
        for index in landed:
            table.commit_raise(index)
        table.publish()
        for index in range(6):
            table.reduce(index, 5)  # a LUT of its own: one copy on the current stream
            table.reduce(index, MIN_BITS)
        table.publish()

    cycle()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["num_device_alloc"]
    with no_waits():
        for _ in range(10):
            cycle()
    assert torch.cuda.memory_stats()["num_device_alloc"] == before
    check_contents(memory)


def test_copies_run_beside_the_compute_stream() -> None:
    """A raise lands while a long kernel that was started after it still runs."""
    memory = on_gpu()
    memory.mover.start(memory.table.begin_raise(0, 3))
    torch.cuda._sleep(2_000_000_000)  # about a second
    done = torch.cuda.Event()
    done.record()
    while not memory.mover.poll():
        pass
    assert not done.query()
    done.synchronize()


def test_pages_are_not_written_before_their_last_reader_is_done() -> None:
    memory = on_gpu()
    torch.cuda._sleep(500_000_000)  # a step that may still read the pages
    reader = torch.cuda.Event()
    reader.record()
    memory.mover.start(memory.table.begin_raise(0, 3))
    while not memory.mover.poll():
        pass
    assert reader.query()
