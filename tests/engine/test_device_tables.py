"""Block tables on the device: what a step needs of them is always there, whoever came and went."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from pw.engine.graphs.inputs import DecodeInputs
from pw.engine.graphs.tables import DeviceTables
from pw.engine.sequence import Chunk, Sequence
from pw.memory.arena import Arena
from pw.memory.kv_cache import KvCache, KvSequence
from pw.memory.pool import PagePool
from pw.models.geometry import KvGeometry, KvLayer

CPU = torch.device("cpu")
# Two sliding layers with 16 tokens a page, a full one with 8.
LAYERS = (
    KvLayer(0, 2, 16, 16, 6, 0),
    KvLayer(1, 2, 16, 16, 6, 1),
    KvLayer(2, 2, 32, 32, None, 2),
)
ROWS, LONGEST = 5, 96


def cache() -> KvCache:
    arena, pool = Arena(400, 4096, CPU), PagePool(400)
    return KvCache(KvGeometry(LAYERS), torch.float32, arena, pool, ROWS, LONGEST, 1000)


def check(kv: KvCache, tables: DeviceTables, lengths: dict[int, int]) -> None:
    """All that the next token of each sequence may read is on the device."""
    rows = np.array(sorted(lengths))
    positions = np.array([lengths[row] - 1 for row in rows])
    tables.follow(rows, positions)
    selected = tables.select(torch.from_numpy(rows))
    for shape, table, found in zip(kv.shapes, kv.block_tables, selected, strict=True):
        for b, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
            seen = 0 if shape.window is None else max(0, position - shape.window + 1)
            read = slice(seen // shape.tokens_per_page, position // shape.tokens_per_page + 1)
            np.testing.assert_array_equal(found[b, :, read].numpy(), table[row, :, read])


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_tables_follow_random_operations(apart: bool, seed: int) -> None:
    drawn = random.Random(seed)
    kv = cache()
    tables = DeviceTables(kv, CPU, apart=apart)
    addresses = [table.data_ptr() for table in tables._tables]
    running: dict[int, KvSequence] = {}
    lengths: dict[int, int] = {}
    for _ in range(150):
        if len(running) < ROWS and drawn.random() < 0.4:
            sequence = kv.open()
            running[sequence.row], lengths[sequence.row] = sequence, drawn.randint(1, 40)
            kv.grow(sequence, lengths[sequence.row])
        for row, sequence in list(running.items()):
            if lengths[row] == LONGEST or drawn.random() < 0.1:
                kv.close(running.pop(row))
                del lengths[row]
            elif drawn.random() < 0.8:
                kv.slide(sequence, lengths[row])
                lengths[row] += 1
                kv.grow(sequence, lengths[row])
        taking = {row: length for row, length in lengths.items() if drawn.random() < 0.7}
        if taking:
            check(kv, tables, taking)
    assert [table.data_ptr() for table in tables._tables] == addresses


def test_a_step_sends_only_what_its_sequences_have_gained() -> None:
    kv = cache()
    tables = DeviceTables(kv, CPU, apart=True)
    sequence = kv.open()
    sent = []
    for length in (20, 21, 24, 25, 33):
        kv.grow(sequence, length)
        before = tables._mirror.sent_bytes
        tables.follow(np.array([0]), np.array([length - 1]))
        sent.append(tables._mirror.sent_bytes - before)
    # 12 bytes an entry: 2 pages of each sliding layer and 3 of the full one; nothing twice; a page
    # of the full layer; one of each layer.
    assert sent == [12 * 7, 0, 0, 12, 12 * 3]


def decoding(kv: KvCache, length: int) -> Chunk:
    """One token at the end of a sequence of so many tokens."""
    nothing: object = None
    sequence = Sequence("r", list(range(length)), nothing, 9, nothing, None)  # type: ignore[arg-type]
    sequence.kv = kv.open()
    kv.grow(sequence.kv, length)
    return Chunk(sequence, length - 1, 1)


def test_padding_stores_nothing_and_belongs_to_no_sequence() -> None:
    kv = cache()
    inputs = DecodeInputs(4, kv, CPU)
    fields = inputs.on_device
    address = fields.ids.data_ptr()
    chunks = [decoding(kv, 20), decoding(kv, 3)]
    inputs.fill([*chunks, decoding(kv, 9), decoding(kv, 11)])
    inputs.fill(chunks)
    assert fields.ids.tolist() == [19, 2, 0, 0]
    assert fields.positions.tolist() == [19, 2, 0, 0]
    assert fields.rows.tolist() == [0, 1, 0, 0]
    assert fields.query_start.tolist() == [0, 1, 2, 2, 2]
    assert fields.seq_lens.tolist() == [20, 3, 0, 0]
    assert fields.live.tolist() == [2]
    sliding, full = (table[:2] for table in kv.block_tables)
    assert fields.slots[0].tolist() == [
        [sliding[0, layer, 1] * 16 + 3, sliding[1, layer, 0] * 16 + 2, -1, -1] for layer in (0, 1)
    ]
    assert fields.slots[1].tolist() == [[full[0, 0, 2] * 8 + 3, full[1, 0, 0] * 8 + 2, -1, -1]]
    inputs.fill([])
    assert fields.live.tolist() == [0]
    assert fields.query_start.tolist() == [0] * 5
    assert fields.ids.data_ptr() == address
