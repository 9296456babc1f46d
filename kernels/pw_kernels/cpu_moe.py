"""Fused MoE on the CPU: planes and tables straight from arena pages, in numba.

Four rows of a block at a time are decoded into a buffer of 4 * Kp floats that stays in the first
cache, then multiplied with all tokens of the expert, two at once. Every dot product adds its terms
in one fixed order, so a token's result is the same in any batch.

Axes as in `reference.py`. A slot is one (token, expert) pair, S = T * k of them; Kp and Np are
columns and rows padded to whole tiles. The jitted functions allocate nothing and work on plain
loops: what numba offers beyond that costs users seconds of compilation.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from pw_kernels import simd, threads
from pw_kernels.bitplane import MAX_BITS, TILE_BYTES, TILE_COLS, TILE_ROWS, padded_cols, padded_rows
from pw_kernels.pages import WeightPages
from pw_kernels.reference import Observer

KINDS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
WORKSPACE_BYTES = 64 << 20  # of intermediate results; more tokens than fit are taken in turns

_TABLE = 1 << MAX_BITS  # floats reserved for the table of one row
_WORD_BYTES = TILE_BYTES // 8  # the 16 words of rows r, r+8, r+16, r+24 of a tile
# Rough costs per weight on one core, to tell when threads pay and how to share experts.
_DECODE_NANOSECONDS = 0.1
_MULTIPLY_NANOSECONDS = 0.03
_NO_BIAS = np.zeros((0, 0), np.float32)

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Bytes = NDArray[np.uint8]


@njit(forceinline=True)
def _load_tables(
    arena: Bytes,
    pages: Ints,  # [LP] of the region
    offset: int,  # byte of the block's table in the region
    width: int,
    row: int,
    is_fp16: bool,
    tables: Floats,
) -> None:
    """Widen the tables of rows row, row + 8, row + 16, row + 24 to float32."""
    size = arena.shape[1]
    entries = 1 << width
    for i in range(4):
        byte = offset + np.int64(row + 8 * i) * 2 * entries
        source = np.int64(pages[byte // size]) * size + byte % size
        for n in range(0, entries, simd.LANES):
            values = simd.load_entries(arena, source + 2 * n, entries - n, is_fp16)
            simd.store(tables, i * _TABLE + n, values)


@njit(forceinline=True)
def _words(arena: Bytes, pages: Ints, index: int, within: int, plane: int, width: int) -> Any:
    """Sixteen words at byte `within` of a plane's page number `index`; zeros beyond the width."""
    page = np.int64(pages[min(plane, width - 1), index])
    return simd.load_words(arena, page * arena.shape[1] + within, plane < width)


@njit
def _decode_rows(
    arena: Bytes,
    pages: Ints,  # [B, PP]
    width: int,
    row_tile: int,
    r: int,
    pitch: int,  # Kp
    tables: Floats,
    weights: Floats,  # [4, Kp] flat, written
) -> None:
    """Decode rows r, r + 8, r + 16, r + 24 of a row tile."""
    col_tiles = pitch // TILE_COLS
    for tile in range(col_tiles):
        byte = (row_tile * col_tiles + tile) * TILE_BYTES + r * _WORD_BYTES
        index, within = byte // arena.shape[1], byte % arena.shape[1]
        w0 = _words(arena, pages, index, within, 0, width)
        w1 = _words(arena, pages, index, within, 1, width)
        w2 = _words(arena, pages, index, within, 2, width)
        w3 = _words(arena, pages, index, within, 3, width)
        at = tile * TILE_COLS
        if width <= 4:
            for s in range(4):
                low = simd.merge(w0, w1, w2, w3, s)
                simd.decode_16(low, low, tables, _TABLE, weights, at + 32 * s, pitch)
            continue
        w4 = _words(arena, pages, index, within, 4, width)
        w5 = _words(arena, pages, index, within, 5, width)
        w6 = _words(arena, pages, index, within, 6, width)
        w7 = _words(arena, pages, index, within, 7, width)
        for s in range(4):
            low = simd.merge(w0, w1, w2, w3, s)
            high = simd.merge(w4, w5, w6, w7, s + 4)
            if width == 5:
                simd.decode_32(low, high, tables, _TABLE, weights, at + 32 * s, pitch)
            elif width == 6:
                simd.decode_64(low, high, tables, _TABLE, weights, at + 32 * s, pitch)
            else:
                simd.decode_256(low, high, tables, _TABLE, weights, at + 32 * s, pitch)


@njit
def _dots(weights: Floats, pitch: int, x: Floats, a: int, b: int) -> Any:
    """Dot products of four decoded rows with the inputs at offsets a and b of flat `x`."""
    zero = simd.splat(np.float32(0))
    a0, a1, a2, a3 = zero, zero, zero, zero
    b0, b1, b2, b3 = zero, zero, zero, zero
    for k in range(0, pitch, simd.LANES):
        xa, xb = simd.load(x, a + k), simd.load(x, b + k)
        w = simd.load(weights, k)
        a0, b0 = simd.fma(w, xa, a0), simd.fma(w, xb, b0)
        w = simd.load(weights, pitch + k)
        a1, b1 = simd.fma(w, xa, a1), simd.fma(w, xb, b1)
        w = simd.load(weights, 2 * pitch + k)
        a2, b2 = simd.fma(w, xa, a2), simd.fma(w, xb, b2)
        w = simd.load(weights, 3 * pitch + k)
        a3, b3 = simd.fma(w, xa, a3), simd.fma(w, xb, b3)
    return simd.sums(a0, a1, a2, a3), simd.sums(b0, b1, b2, b3)


@njit
def _multiply(
    arena: Bytes,
    plane_pages: Ints,  # [B, PP]
    lut_pages: Ints,  # [LP]
    lut_offset: int,
    width: int,
    is_fp16: bool,
    x: Floats,  # [*, Kp]
    x_rows: Longs,  # [n] rows of x
    out: Floats,  # [*, Np], added to
    out_rows: Longs,  # [n] rows of out
    tables: Floats,
    weights: Floats,
) -> None:
    """Add one block's product with each input row to the output row of the same slot."""
    pitch, count = x.shape[1], x_rows.shape[0]
    for row_tile in range(out.shape[1] // TILE_ROWS):
        for r in range(8):
            row = row_tile * TILE_ROWS + r
            _load_tables(arena, lut_pages, lut_offset, width, row, is_fp16, tables)
            _decode_rows(arena, plane_pages, width, row_tile, r, pitch, tables, weights)
            for n in range(0, count, 2):
                m = min(n + 1, count - 1)
                left, right = _dots(weights, pitch, x, x_rows[n] * pitch, x_rows[m] * pitch)
                for i in range(4):
                    out[out_rows[n], row + 8 * i] += left[i]
                    if m > n:
                        out[out_rows[m], row + 8 * i] += right[i]


@njit
def _activate(kind: int, gate_up: Floats, width: int, hidden: Floats, slots: Longs) -> None:
    """act(gate) * up of the rows `slots` of [S, Np] into [S, Kp]; columns past `width` are zero."""
    linear = simd.splat(np.float32(2 * math.sqrt(2 / math.pi)))
    cubic = simd.splat(np.float32(2 * math.sqrt(2 / math.pi) * 0.044715))
    for slot in slots:
        source, target = slot * gate_up.shape[1], slot * hidden.shape[1]
        if kind == 1:
            for i in range(width):
                value = gate_up[slot, i]
                gate_up[slot, i] = value * (0.5 + 0.5 * math.erf(value * math.sqrt(0.5)))
        for i in range(0, width, simd.LANES):
            gate = simd.load(gate_up, source + i)
            if kind == 0:
                gate = simd.swish(gate, gate)
            elif kind == 2:
                factor = simd.fma(simd.mul(gate, gate), cubic, linear)
                gate = simd.swish(gate, simd.mul(gate, factor))
            up = simd.load(gate_up, source + width + i)
            simd.store(hidden, target + i, simd.mul(gate, up))
        for i in range(width, hidden.shape[1]):
            hidden[slot, i] = 0


@njit
def _start(out: Floats, slots: Longs, bias: Floats, expert: int) -> None:
    """Set the rows `slots` of `out` to an expert's bias, or to zero."""
    columns = bias.shape[1]
    for slot in slots:
        for n in range(out.shape[1]):
            out[slot, n] = bias[expert, n] if n < columns else np.float32(0)


@njit
def _group(ids: Longs, experts: int, starts: Longs, order: Longs, tokens: Longs) -> None:
    """Sort slots by expert; those of expert e are entries starts[e] to starts[e + 1] of `order`.

    Ids outside [0, E) are left out. `tokens` gets the token of each entry.
    """
    for expert in range(experts + 2):
        starts[expert] = 0
    for token in range(ids.shape[0]):
        for j in range(ids.shape[1]):
            if 0 <= ids[token, j] < experts:
                starts[ids[token, j] + 2] += 1
    for expert in range(experts):
        starts[expert + 2] += starts[expert + 1]
    for token in range(ids.shape[0]):
        for j in range(ids.shape[1]):
            expert = ids[token, j]
            if 0 <= expert < experts:
                order[starts[expert + 1]] = token * ids.shape[1] + j
                tokens[starts[expert + 1]] = token
                starts[expert + 1] += 1


@njit(cache=True, nogil=True)
def _combine(ids: Longs, experts: int, weights: Floats, slots: Floats, out: Floats) -> None:
    """Add the experts of each token in slot order."""
    top_k = ids.shape[1]
    for t in range(ids.shape[0]):
        for n in range(out.shape[1]):
            out[t, n] = 0
        for j in range(top_k):
            if 0 <= ids[t, j] < experts:
                for n in range(out.shape[1]):
                    out[t, n] += weights[t, j] * slots[t * top_k + j, n]


@njit(cache=True, nogil=True)
def _count(ids: Longs, weights: Floats, statistics: Floats) -> None:
    """As `reference.count_routing`."""
    for t in range(ids.shape[0]):
        for j in range(ids.shape[1]):
            expert, weight = ids[t, j], weights[t, j]
            if 0 <= expert < statistics.shape[1]:
                statistics[0, expert] += weight
                statistics[1, expert] += weight * weight


@njit(cache=True, nogil=True)
def _experts(
    first: int,  # experts first to last - 1 are run
    last: int,
    x: Floats,  # [T, Kp]
    ids: Longs,  # [T, k]
    arena: Bytes,  # [P, page_bytes]
    gate_up: Any,  # WeightPages.arrays
    down: Any,
    width: int,  # I
    gate_up_bias: Floats,  # [E, 2I] or [0, 0]
    down_bias: Floats,  # [E, H] or [0, 0]
    is_fp16: bool,
    kind: int,
    longs: Longs,  # [E + 2 + 2S] scratch of this call
    rows: Floats,  # [4 * 256 + 4 * max Kp] scratch of this call
    before: Floats,  # [S, Np of gate_up] scratch
    hidden: Floats,  # [S, Kp of down] scratch
    slots: Floats,  # [S, Np of down], rows of these experts are written
) -> None:
    """Output of each slot that belongs to a range of experts."""
    experts = gate_up[0].shape[0]
    starts, order = longs[: experts + 2], longs[experts + 2 : experts + 2 + ids.size]
    tokens = longs[experts + 2 + ids.size :]
    tables, buffer = rows[: 4 * _TABLE], rows[4 * _TABLE :]
    up_bits, up_planes, up_luts, up_offsets = gate_up
    down_bits, down_planes, down_luts, down_offsets = down
    _group(ids, experts, starts, order, tokens)
    for e in range(first, last):
        if starts[e] == starts[e + 1]:
            continue
        own, own_tokens = order[starts[e] : starts[e + 1]], tokens[starts[e] : starts[e + 1]]
        _start(before, own, gate_up_bias, e)
        _multiply(arena, up_planes[e], up_luts[e], up_offsets[e], up_bits[e], is_fp16,
                  x, own_tokens, before, own, tables, buffer)  # fmt: skip
        _activate(kind, before, width, hidden, own)
        _start(slots, own, down_bias, e)
        _multiply(arena, down_planes[e], down_luts[e], down_offsets[e], down_bits[e], is_fp16,
                  hidden, own, slots, own, tables, buffer)  # fmt: skip


def _shares(ids: Longs, experts: int, weights: int) -> list[tuple[int, int]]:
    """Ranges of experts for the threads: decoding costs once an expert, multiplying per slot."""
    if ids.size * weights * _DECODE_NANOSECONDS < threads.WORTH_NANOSECONDS:
        return [(0, experts)]
    counts = np.bincount(ids[(ids >= 0) & (ids < experts)], minlength=experts)
    costs = weights * (_DECODE_NANOSECONDS * (counts > 0) + _MULTIPLY_NANOSECONDS * counts)
    return threads.split(costs)


def _padded(x: Tensor, columns: int) -> Floats:
    """Rows of `x` as contiguous float32, with zero columns appended up to `columns`."""
    rows = x.float().contiguous().numpy()
    if rows.shape[1] != columns:
        rows = np.pad(rows, ((0, 0), (0, columns - rows.shape[1])))
    return rows


def _bias(bias: Tensor | None) -> Floats:
    return _NO_BIAS if bias is None else bias.float().contiguous().numpy()


def _observe(
    observer: Observer,
    start: int,  # token of the batch that opens the turn
    x: Tensor,  # [T, H]
    ids: Longs,  # [T, k]
    weights: Tensor,  # [T, k]
    hidden: Floats,  # [S, Kp]
    experts: int,
    width: int,
) -> None:
    """Show an observer what the experts of one turn have seen and made."""
    for expert in np.unique(ids[(ids >= 0) & (ids < experts)]).tolist():
        token, slot = (torch.from_numpy(index) for index in np.nonzero(ids == expert))
        rows = torch.from_numpy(hidden)[token * ids.shape[1] + slot, :width]
        observer(expert, token + start, weights[token, slot], x[token].float(), rows)


def fused_moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    arena: Tensor,
    gate_up: WeightPages,
    down: WeightPages,
    *,
    lut_dtype: torch.dtype,
    activation: str,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    observer: Observer | None = None,
    statistics: Tensor | None = None,
) -> Tensor:
    """As `reference.fused_moe`, for gated experts with a named activation, on CPU tensors.

    A batch that is taken in turns calls the observer once a turn for each expert. To `statistics`,
    [2, E] fp32, the router weights of each expert and their squares are added.
    """
    pitch, hidden_pitch = padded_cols(gate_up.cols), padded_cols(down.cols)
    before_rows, out_rows = padded_rows(gate_up.rows), padded_rows(down.rows)
    inputs, ids = _padded(x, pitch), topk_ids.contiguous().numpy()
    weights = topk_weights.float().contiguous().numpy()
    if statistics is not None:
        _count(ids, weights, statistics.numpy())
    shared = (
        arena.numpy(),
        gate_up.arrays,
        down.arrays,
        down.cols,
        _bias(gate_up_bias),
        _bias(down_bias),
        lut_dtype == torch.float16,
        KINDS[activation],
    )
    tokens, top_k = ids.shape
    slot_bytes = 4 * (before_rows + hidden_pitch + out_rows)
    turn = max(1, min(tokens, WORKSPACE_BYTES // (slot_bytes * top_k)))
    slots = turn * top_k
    before = np.empty((slots, before_rows), np.float32)
    hidden = np.empty((slots, hidden_pitch), np.float32)
    results = np.empty((slots, out_rows), np.float32)
    out = np.empty((tokens, down.rows), np.float32)

    def run(first: int, last: int, part: slice) -> None:
        longs = np.empty(gate_up.experts + 2 + 2 * slots, np.int64)
        rows = np.empty(4 * (_TABLE + max(pitch, hidden_pitch)), np.float32)
        _experts(
            first, last, inputs[part], ids[part], *shared, longs, rows, before, hidden, results
        )

    block_weights = gate_up.rows * gate_up.cols + down.rows * down.cols
    for start in range(0, tokens, turn):
        part = slice(start, start + turn)
        shares = _shares(ids[part], gate_up.experts, block_weights)
        threads.run([partial(run, first, last, part) for first, last in shares])
        if observer is not None:
            _observe(
                observer, start, x[part], ids[part], topk_weights[part],
                hidden, gate_up.experts, down.cols,
            )  # fmt: skip
        _combine(ids[part], gate_up.experts, weights[part], results, out[part])
    return torch.from_numpy(out).to(x.dtype)
