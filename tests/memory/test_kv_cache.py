"""Pages of sequences: exact ids, layers with different geometry, what is read and written."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pw.memory.arena import Arena
from pw.memory.kv_cache import KvCache, KvSequence
from pw.memory.kv_layout import token_bytes
from pw.memory.pool import OutOfPagesError, PagePool
from pw.models.geometry import KvGeometry, KvLayer
from pw_kernels.dispatch import paged_attention, write_kv

# Two sliding layers with 16 tokens a page, a full one with 8, and one that shares layer 0's keys.
LAYERS = (
    KvLayer(0, 2, 16, 16, 6, 0),
    KvLayer(1, 2, 16, 16, 6, 1),
    KvLayer(2, 2, 32, 32, None, 2),
    KvLayer(3, 2, 16, 16, 6, 0),
)


def make(pages: int = 30, max_tokens: int = 64, rows: int = 3) -> tuple[KvCache, PagePool]:
    arena, pool = Arena(pages, 4096, torch.device("cpu")), PagePool(pages)
    return KvCache(KvGeometry(LAYERS), torch.float32, arena, pool, rows, max_tokens, 100), pool


def held(kv: KvCache, sequence: KvSequence) -> list[list[int]]:
    """Pages in the block tables of a sequence, by group."""
    tables = [group.table[sequence.row].reshape(-1).tolist() for group in kv._groups]
    return [[page for page in table if page >= 0] for table in tables]


def test_pages_are_counted_per_layer_by_its_own_tokens() -> None:
    kv, _ = make()
    assert [token_bytes(layer, torch.float32) for layer in LAYERS[:3]] == [256, 256, 512]
    assert [kv.pages_for_tokens(n) for n in (0, 1, 8, 9, 16, 17)] == [0, 3, 3, 4, 4, 7]
    sequence = kv.open()
    assert kv.pages_to_grow(sequence, 9) == 4
    kv.grow(sequence, 9)
    assert [kv.pages_to_grow(sequence, n) for n in (9, 16, 17)] == [0, 0, 3]


def test_block_tables_hold_exactly_the_pages_taken_in_order() -> None:
    kv, pool = make()
    a, b = kv.open(), kv.open()
    assert (a.row, b.row, a.owner, b.owner) == (0, 1, 100, 101)
    kv.grow(a, 9)
    # The pool hands its last pages out first; group by group, layer by layer.
    assert held(kv, a) == [[3, 2], [1, 0]]
    kv.grow(b, 4)
    kv.grow(a, 18)
    assert held(kv, b) == [[6, 5], [4]]
    assert held(kv, a) == [[3, 9, 2, 8], [1, 0, 7]]
    rows = np.array([a.row, b.row])
    batch = kv.batch(rows, np.array([0, 0, 1]), np.array([16, 17, 3]), 18)
    small, large = (group.block_tables.tolist() for group in batch)
    assert small == [[[3, 9], [6, -1]], [[2, 8], [5, -1]]]
    assert large == [[[1, 0, 7], [4, -1, -1]]]
    slots = [group.slots.tolist() for group in batch]
    assert slots == [[[9 * 16, 9 * 16 + 1, 6 * 16 + 3], [8 * 16, 8 * 16 + 1, 5 * 16 + 3]],
                     [[7 * 8, 7 * 8 + 1, 4 * 8 + 3]]]  # fmt: skip
    assert all(group.slots.is_contiguous() for group in batch)
    assert (kv.place(0), kv.place(1), kv.place(2)) == ((0, 0), (0, 1), (1, 0))
    kv.close(a)
    assert pool.free_count == 30 - 3
    assert kv.open().row == a.row
    kv.check_integrity()


def test_growth_beyond_the_free_pages_changes_nothing() -> None:
    kv, pool = make(pages=5)
    sequence = kv.open()
    kv.grow(sequence, 8)
    with pytest.raises(OutOfPagesError, match="4 pages asked for, 2 free"):
        kv.grow(sequence, 17)
    assert (sequence.blocks, kv.used_pages, pool.free_count) == ([1, 1], 3, 2)
    kv.check_integrity()


def test_views_of_layers_share_the_arena_without_overlap() -> None:
    kv, pool = make()
    sequence = kv.open()
    kv.grow(sequence, 24)
    expected = {}
    rows, which = np.array([sequence.row]), np.zeros(24, dtype=np.int64)
    batch = kv.batch(rows, which, np.arange(24), 24)
    for layer in LAYERS[:3]:
        pages, (group, position) = kv.layer_pages(layer.layer), kv.place(layer.layer)
        k = torch.randn(24, layer.kv_heads, layer.k_dim)
        v = torch.randn(24, layer.kv_heads, layer.v_dim)
        write_kv(k, v, pages.keys, pages.values, batch[group].slots[position])
        expected[layer.layer] = (k, v)
    for layer in LAYERS[:3]:
        pages, (group, position) = kv.layer_pages(layer.layer), kv.place(layer.layer)
        size = pages.keys.shape[1]
        slots = batch[group].slots[position]
        k, v = expected[layer.layer]
        assert torch.equal(pages.keys[slots // size, slots % size], k)
        assert torch.equal(pages.values[slots // size, slots % size], v)
    used = [page for pages in held(kv, sequence) for page in pages]
    untouched = [page for page in range(pool.num_pages) if page not in used]
    assert not kv.layer_pages(0).keys[untouched].any()


@pytest.mark.parametrize("layer", [LAYERS[0], LAYERS[2]], ids=["sliding", "full"])
def test_attention_over_pages_equals_attention_over_a_plain_cache(layer: KvLayer) -> None:
    kv, _ = make()
    other, sequence = kv.open(), kv.open()
    kv.grow(other, 3)
    kv.grow(sequence, 20)
    rows, which = np.array([sequence.row]), np.zeros(20, dtype=np.int64)
    group, position = kv.place(layer.layer)
    batch = kv.batch(rows, which, np.arange(20), 20)[group]
    pages = kv.layer_pages(layer.layer)
    q = torch.randn(20, 4, layer.k_dim)
    k, v = torch.randn(2, 20, layer.kv_heads, layer.k_dim)
    write_kv(k, v, pages.keys, pages.values, batch.slots[position])
    found = paged_attention(
        q, pages.keys, pages.values, batch.block_tables[position],
        torch.tensor([0, 20], dtype=torch.int32), torch.tensor([20], dtype=torch.int32),
        scale=0.3, window=layer.window,
    )  # fmt: skip
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) * 0.3
    visible = torch.ones(20, 20, dtype=torch.bool).tril()
    if layer.window is not None:
        visible &= ~torch.ones(20, 20, dtype=torch.bool).tril(-layer.window)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    expected = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(2, 1))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_integrity_notices_foreign_and_lost_pages() -> None:
    kv, pool = make()
    sequence = kv.open()
    kv.grow(sequence, 4)
    page = held(kv, sequence)[0][0]
    pool.owner[page] = 7
    with pytest.raises(AssertionError, match="pages of another owner"):
        kv.check_integrity()
    pool.owner[page] = sequence.owner
    kv.check_integrity()
    pool.owner[29] = sequence.owner
    with pytest.raises(AssertionError, match="4 KV pages in the pool, 3 in sequences"):
        kv.check_integrity()


def test_pages_left_of_a_window_are_free_for_others() -> None:
    """Two sliding layers see 6 tokens and slide by units of 16; the full layer keeps everything."""
    kv, pool = make(rows=1)
    sequence = kv.open()
    for computed in range(0, 64, 4):  # in chunks of four
        kv.slide(sequence, computed)
        kv.grow(sequence, computed + 4)
        kv.check_integrity()
        sliding, full = held(kv, sequence)
        left = max(0, computed - 5) // 16  # units that position `computed` cannot see
        assert len(sliding) == 2 * (-(-(computed + 4) // 16) - left)
        assert len(full) == -(-(computed + 4) // 8)
    assert kv.used_pages == 2 + 8
    kv.close(sequence)
    assert pool.free_count == 30
    kv.check_integrity()


@pytest.mark.parametrize("chunk", [1, 4, 16, 64])
def test_peak_counts_what_a_growing_sequence_holds_at_most(chunk: int) -> None:
    arena, pool = Arena(30, 4096, torch.device("cpu")), PagePool(30)
    kv = KvCache(KvGeometry(LAYERS), torch.float32, arena, pool, 1, 64, 100, chunk_tokens=chunk)
    for length in (1, 17, 40, 64):
        sequence, most, ahead = kv.open(), 0, 0
        for computed in range(0, length, chunk):
            kv.slide(sequence, computed)
            ahead = max(ahead, kv.used_pages + kv.pages_ahead(sequence, length))
            kv.grow(sequence, min(computed + chunk, length))
            most = max(most, kv.used_pages)
        kv.close(sequence)
        assert most <= ahead == kv.pages_for_tokens(length)
        assert kv.pages_for_tokens(length) - most <= 2  # one unit more of the sliding layers
    unlimited = KvCache(KvGeometry(LAYERS), torch.float32, arena, PagePool(30), 1, 64, 100)
    assert unlimited.pages_for_tokens(64) == 2 * 4 + 8  # a whole prompt may come in one step
    assert kv.pages_for_tokens(64) <= unlimited.pages_for_tokens(64)
