"""Mover: chunks, order, neighbours, urgency, budget, what is dropped, what a late copy may hide."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.memory import (
    GEOMETRY,
    MAX_BITS,
    MIN_BITS,
    LateLane,
    Memory,
    check_contents,
    loaded,
    make_memory,
)

PAGE = 4096


def late(memory: Memory) -> LateLane:
    lane = memory.mover._lane
    assert isinstance(lane, LateLane)
    return lane


def test_a_poll_moves_one_chunk_and_raises_land_in_order() -> None:
    memory = loaded(chunk_bytes=2 * PAGE)
    first, second = memory.table.begin_raise(0, 4), memory.table.begin_raise(1, 3)
    for move in (first, second):
        memory.mover.start(move)
    assert memory.mover.pending == 2
    pages = len(first.pages) + len(second.pages)
    landed = []
    for poll in range(1, 100):
        landed += memory.mover.poll()
        copied = sum(bool(memory.arena.pages[p].any()) for p in first.pages + second.pages)
        assert copied <= 2 * poll
        if len(landed) == 2:
            break
    assert copied == pages
    assert sorted(landed) == [0, 1]
    assert memory.mover.pending == 0
    assert memory.mover.poll() == []


def test_a_raise_without_a_lut_of_its_own_lands_with_its_planes() -> None:
    memory = loaded(base_bits=MAX_BITS)
    move = memory.table.begin_raise(2, MAX_BITS)
    assert not move.lut_pages
    memory.mover.start(move)
    assert memory.mover.pending == 1
    assert memory.mover.wait() == [2]


def test_neighbours_travel_as_one_copy_whatever_the_order_of_the_plan() -> None:
    memory = loaded(chunk_bytes=1 << 20, lane=LateLane)
    for index in (5, 3, 0, 4, 1, 2):  # all blocks of the first layer, one plane each
        memory.mover.start(memory.table.begin_raise(index, 3))
    memory.mover.poll()
    ((runs, pages, _),) = late(memory).chunks
    assert len(runs) == 1
    assert len(pages) == len(runs[0]) == 6
    late(memory).let_go(1)
    for index in memory.mover.poll():
        memory.table.commit_raise(index)
    assert memory.table.committed[:6].tolist() == [3] * 6
    assert (memory.mover.copies, memory.mover.copied_bytes) == (1, 6 * PAGE)
    check_contents(memory)


def test_a_gap_or_another_width_ends_a_run() -> None:
    memory = loaded(chunk_bytes=1 << 20, lane=LateLane)
    for index, bits in ((0, 3), (2, 3), (3, 4)):
        memory.mover.start(memory.table.begin_raise(index, bits))
    memory.mover.poll()
    ((runs, _, _),) = late(memory).chunks
    # Block 0 | blocks 2 and 3 | plane 3 of block 3 with its LUT.
    assert [len(run) for run in runs] == [1, 2, 1 + memory.layouts[1].lut_pages(4)]


def test_a_part_that_fits_a_chunk_is_not_cut() -> None:
    memory = loaded(chunk_bytes=3 * PAGE, lane=LateLane)
    sizes = [len(memory.table.begin_raise(index, 4).pages) for index in (0, 2)]
    for index in (0, 2):
        memory.mover.start(memory.table.in_transfer[index])
    while memory.mover.pending:
        memory.mover.poll()
        late(memory).let_go(len(late(memory).chunks))
    cut = [len(pages) for _, pages, _ in late(memory).chunks]
    assert sum(cut) == sum(sizes)
    wide = 1 + memory.layouts[0].lut_pages(4)
    assert cut == [2, wide, wide]


def test_at_most_so_many_chunks_are_under_way_and_a_poll_never_waits() -> None:
    memory = loaded(chunk_bytes=PAGE, lane=LateLane)
    memory.mover.start(memory.table.begin_raise(0, MAX_BITS))
    for _ in range(5):
        assert memory.mover.poll() == []
        assert len(late(memory).chunks) == 2
    late(memory).let_go(1)
    memory.mover.poll()
    assert len(late(memory).chunks) == 3
    assert late(memory).waits == 0


def test_urgent_raises_go_first() -> None:
    memory = loaded(chunk_bytes=PAGE)
    for index in (0, 1, 2):
        memory.mover.start(memory.table.begin_raise(index, 3))
    assert memory.mover.poll() == [0]
    memory.mover.start(memory.table.begin_raise(5, 3), urgent=True)
    assert [memory.mover.poll() for _ in range(3)] == [[5], [1], [2]]


def test_pages_are_written_behind_a_fence_of_the_raise_that_took_them() -> None:
    memory = loaded(chunk_bytes=2 * PAGE, lane=LateLane)
    for index in (0, 1):
        memory.mover.start(memory.table.begin_raise(index, 3))
    memory.mover.poll()
    memory.mover.start(memory.table.begin_raise(2, 3))
    memory.mover.poll()
    assert [fence for _, _, fence in late(memory).chunks] == [1, 2]


def test_the_budget_holds_back_reloads_and_nothing_else() -> None:
    now = [0.0]
    rate = 16 * PAGE  # a burst of one page: a chunk passes, the next after a sixteenth of a second
    memory = loaded(chunk_bytes=PAGE, bytes_per_second=rate, clock=lambda: now[0])
    for index in (0, 1, 2):
        memory.mover.start(memory.table.begin_raise(index, 3))
    assert memory.mover.poll() == [0]
    assert memory.mover.poll() == memory.mover.poll() == []
    memory.mover.start(memory.table.begin_raise(3, 3), urgent=True)
    assert memory.mover.poll() == [3]
    assert memory.mover.poll() == []
    now[0] += 1 / 16 + 1e-9
    assert memory.mover.poll() == [1]
    assert memory.mover.poll() == []
    assert memory.mover.wait() == [2]  # who waits does not save bandwidth


def test_dropped_copies_write_no_more_and_name_every_block() -> None:
    memory = loaded(chunk_bytes=PAGE)
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


def test_dropping_waits_for_what_is_under_way_alone() -> None:
    memory = loaded(chunk_bytes=PAGE, lane=LateLane)
    memory.mover.start(memory.table.begin_raise(0, MAX_BITS))
    memory.mover.poll()
    assert memory.mover.drop() == [0]
    assert late(memory).gone == len(late(memory).chunks) == 2
    assert late(memory).waits == 1
    assert memory.mover.poll() == []
    assert len(late(memory).chunks) == 2


@pytest.mark.parametrize("readers", [0, 3])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_every_transition_between_device_host_and_disk_keeps_the_bytes(
    share: float, readers: int
) -> None:
    """Random raises, reductions and recalls: all blocks decode to the weights of their widths."""
    limit = int(share * make_memory().store.bytes)
    memory = loaded(host_limit=limit, readers=readers, lane=LateLane, chunk_bytes=3 * PAGE)
    assert memory.store.bytes <= limit
    random = np.random.default_rng(7)
    table, mover = memory.table, memory.mover
    for turn in range(30):
        for index in mover.poll():
            table.commit_raise(index)
        late(memory).let_go(len(late(memory).chunks) - int(random.integers(2)))
        for index in random.permutation(GEOMETRY.blocks)[:4].tolist():
            bits = int(table.committed[index])
            to = int(random.integers(MIN_BITS, MAX_BITS + 1))
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
        if turn % 3 == 2:
            check_contents(memory)
    for index in mover.wait():
        table.commit_raise(index)
    assert mover.take_failed() == []
    check_contents(memory)
    assert (memory.store.disk_reads > 0) == (share < 1)
