"""Committed bits, pages and contents of the weight page table under every kind of change."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from pw.memory.kv_cache import KvCache
from pw.memory.pool import OutOfPagesError, PagePool
from pw.models.geometry import KvGeometry, KvLayer
from pw_kernels.reference import decode_block
from support.memory import GEOMETRY, MAX_BITS, MIN_BITS, make_memory


def full(bits: int) -> np.ndarray:
    return np.full(GEOMETRY.blocks, bits, dtype=np.int64)


def assert_contents(memory, index: int) -> None:
    """The block decodes, from the arena, to the source's own weights at the committed width."""
    memory.table.publish()
    key = GEOMETRY.key(index)
    pages = memory.table.pages_of(GEOMETRY.slot(key.layer), key.module)
    decoded = decode_block(memory.arena.pages, pages, key.expert, torch.bfloat16)
    bits = int(memory.table.committed[index])
    assert torch.equal(decoded, memory.source.weight(key, bits)), (str(key), bits)


def check(memory, kv: KvCache | None = None) -> None:
    memory.pool.check_integrity()
    memory.table.check_integrity()
    used = memory.table.resident_pages()
    if kv is not None:
        kv.check_integrity()
        used += kv.used_pages
    assert used + memory.pool.free_count == memory.pool.num_pages


def raise_now(memory, index: int, to_bits: int) -> None:
    memory.mover.start(memory.table.begin_raise(index, to_bits))
    for landed in memory.mover.wait():
        memory.table.commit_raise(landed)


@pytest.mark.parametrize("base_bits", [2, 4, 6])
def test_every_transition_equals_a_fresh_load(base_bits: int) -> None:
    for start in range(MIN_BITS, MAX_BITS + 1):
        for end in {MIN_BITS, start - 1, start + 1, MAX_BITS} - {1, 7, start}:
            memory = make_memory(base_bits=base_bits)
            memory.table.load(full(start))
            for index in (0, 1, GEOMETRY.blocks - 1):
                if end < start:
                    memory.table.reduce(index, end)
                elif end > start:
                    raise_now(memory, index, end)
            check(memory)
            for index in range(GEOMETRY.blocks):
                assert_contents(memory, index)


def test_reduction_frees_exactly_the_difference_at_once() -> None:
    memory = make_memory()
    memory.table.load(full(MAX_BITS))
    cost = memory.table.cost_bytes()
    before = memory.pool.free_count
    freed = memory.table.reduce(0, MIN_BITS)
    assert freed * memory.arena.page_bytes == cost[0, -1] - cost[0, 0]
    assert memory.pool.free_count == before + freed
    assert (np.diff(cost, axis=1) > 0).all()


@pytest.mark.parametrize("then", ["reduced", "raised", "to the base"])
def test_a_lut_that_waits_for_the_step_overwrites_nobody(then: str) -> None:
    """Its pages may have gone to others by then."""
    memory = make_memory(base_bits=3)
    table, index = memory.table, 4
    table.load(full(MAX_BITS))
    table.reduce(index, 5)
    waiting = set(table._lut_pages[index])
    if then == "raised":
        raise_now(memory, index, MAX_BITS)
    else:
        table.reduce(index, 4 if then == "reduced" else 3)
    others = memory.pool.take(memory.pool.free_count, 1 << 30)
    assert waiting & set(others)
    memory.arena.pages[others] = 77
    table.publish()
    assert bool((memory.arena.pages[others] == 77).all())
    for block in range(GEOMETRY.blocks):
        assert_contents(memory, block)


def test_old_width_is_served_until_the_commit() -> None:
    memory = make_memory(chunk_bytes=4096)
    memory.table.load(full(MIN_BITS))
    memory.mover.start(memory.table.begin_raise(0, MAX_BITS))
    polls = 0
    while not (landed := memory.mover.poll()):
        polls += 1
        assert memory.table.committed[0] == MIN_BITS
        assert_contents(memory, 0)
        check(memory)
    assert landed == [0]
    assert polls > 2
    assert memory.table.commit_raise(0) == MAX_BITS
    assert_contents(memory, 0)
    check(memory)


def test_cancelled_raise_gives_its_pages_back_after_the_copy() -> None:
    memory = make_memory()
    memory.table.load(full(3))
    free = memory.pool.free_count
    memory.mover.start(memory.table.begin_raise(4, MAX_BITS))
    memory.table.cancel_raise(4)
    assert memory.pool.free_count < free
    assert memory.mover.wait() == [4]
    assert memory.table.commit_raise(4) == 3
    assert memory.pool.free_count == free
    assert_contents(memory, 4)
    check(memory)


def test_blocks_beyond_the_host_limit_come_from_the_source() -> None:
    memory = make_memory(host_limit=40 * 4096)
    assert 0 < memory.store.bytes <= 40 * 4096
    memory.table.load(full(MIN_BITS))
    reads = memory.store.disk_reads
    for index in range(GEOMETRY.blocks):
        raise_now(memory, index, MAX_BITS)
        assert_contents(memory, index)
    assert memory.store.disk_reads > reads
    check(memory)


def test_pool_refuses_foreign_pages_and_overdraft() -> None:
    pool = PagePool(4)
    pages = pool.take(3, owner=7)
    with pytest.raises(OutOfPagesError, match="2 pages asked for, 1 free"):
        pool.take(2, owner=8)
    with pytest.raises(AssertionError, match="gives back pages of others"):
        pool.give_back(pages, owner=8)
    pool.give_back(pages, owner=7)
    pool.check_integrity()
    assert pool.free_count == 4


def test_ten_thousand_random_operations_keep_every_invariant() -> None:
    """Plan, move, commit, cancel, allocate, free in random order; integrity after every step."""
    rng = random.Random(0)
    memory = make_memory(pages=420, chunk_bytes=8192)
    table, pool, mover = memory.table, memory.pool, memory.mover
    layers = (KvLayer(0, 2, 16, 16, None, 0), KvLayer(1, 1, 32, 16, None, 1))
    kv = KvCache(KvGeometry(layers), torch.float32, memory.arena, pool, 6, 400, GEOMETRY.blocks)
    table.load(full(4))
    sequences: list[tuple[object, int]] = []
    done = {"reduce": 0, "raise": 0, "commit": 0, "cancel": 0, "grow": 0, "close": 0}
    for step in range(10_000):
        action = rng.choice(list(done))
        index = rng.randrange(GEOMETRY.blocks)
        bits = int(table.committed[index])
        if action == "reduce" and index not in table.in_transfer and bits > MIN_BITS:
            table.reduce(index, rng.randrange(MIN_BITS, bits))
        elif action == "raise" and index not in table.in_transfer and bits < MAX_BITS:
            to_bits = rng.randrange(bits + 1, MAX_BITS + 1)
            if table.raise_pages(index, to_bits) > pool.free_count:
                continue
            mover.start(table.begin_raise(index, to_bits))
        elif action == "commit":
            for landed in mover.poll():
                table.commit_raise(landed)
                assert_contents(memory, landed)
        elif action == "cancel" and table.in_transfer:
            table.cancel_raise(rng.choice(list(table.in_transfer)))
        elif action == "grow":
            if len(sequences) < 6:
                sequences.append((kv.open(), 0))
            which = rng.randrange(len(sequences))
            sequence, tokens = sequences[which]
            tokens = min(400, tokens + rng.randrange(1, 40))
            if kv.pages_to_grow(sequence, tokens) > pool.free_count:
                continue
            kv.grow(sequence, tokens)
            sequences[which] = (sequence, tokens)
        elif action == "close" and sequences:
            kv.close(sequences.pop(rng.randrange(len(sequences)))[0])
        else:
            continue
        done[action] += 1
        if step % 500 == 0:
            check(memory, kv)
        else:
            assert table.resident_pages() + kv.used_pages + pool.free_count == pool.num_pages
            table.check_integrity()
    assert min(done.values()) > 200, done
    for landed in mover.wait():
        table.commit_raise(landed)
    for sequence, _ in sequences:
        kv.close(sequence)
    check(memory, kv)
    for index in range(GEOMETRY.blocks):
        assert_contents(memory, index)


def test_hundred_squeeze_cycles_return_bit_exact_without_losing_a_page() -> None:
    memory = make_memory()
    memory.table.load(full(MAX_BITS))
    free = memory.pool.free_count
    for cycle in range(100):
        for index in range(GEOMETRY.blocks):
            memory.table.reduce(index, MIN_BITS + (cycle + index) % 3)
        for index in range(GEOMETRY.blocks):
            raise_now(memory, index, MAX_BITS)
    assert memory.pool.free_count == free
    check(memory)
    for index in range(GEOMETRY.blocks):
        assert_contents(memory, index)
