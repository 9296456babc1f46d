"""Pages of sequences: exact ids, layers with different geometry, what is read and written."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pw.memory.arena import Arena
from pw.memory.kv_cache import KvCache, token_bytes
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
    assert a.pages == [3, 2, 1, 0]
    kv.grow(b, 4)
    kv.grow(a, 18)
    assert b.pages == [6, 5, 4]
    assert a.pages == [3, 2, 1, 0, 9, 8, 7]
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
    assert kv.close(a) == 7
    assert pool.free_count == 30 - 3
    assert kv.open().row == a.row
    kv.check_integrity()


def test_growth_beyond_the_free_pages_changes_nothing() -> None:
    kv, pool = make(pages=5)
    sequence = kv.open()
    kv.grow(sequence, 8)
    with pytest.raises(OutOfPagesError, match="4 pages asked for, 2 free"):
        kv.grow(sequence, 17)
    assert (len(sequence.pages), kv.used_pages, pool.free_count) == (3, 3, 2)
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
    used = sorted(sequence.pages)
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
    pool.owner[sequence.pages[0]] = 7
    with pytest.raises(AssertionError, match="pages of another owner"):
        kv.check_integrity()
    pool.owner[sequence.pages[0]] = sequence.owner
    kv.check_integrity()
    sequence.pages.append(sequence.pages[0])
    with pytest.raises(AssertionError, match="block table and page list disagree"):
        kv.check_integrity()
