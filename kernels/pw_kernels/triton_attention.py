"""Paged attention in Triton, for any GPU that Triton knows.

One kernel serves decode and chunked prefill. A program takes a tile of queries of one sequence,
with all query heads that share a key head, and walks the keys that the tile may see. Small batches
are split over keys: cuts lie at fixed positions, so a token's result does not depend on the batch,
and a second kernel merges the parts in a fixed order. Grids depend on shapes alone and nothing
waits for the device, so a call can be captured in a CUDA graph. How many programs share the parts
of a sequence depends on the batch, not on the longest context there may be.

Axes as in `reference.py`. A row is one (query, query head of the group) pair of a tile.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pw_kernels.triton_tiles import SMALLEST_DOT, tile_shape

SPLIT_KEYS = 512  # keys of a part; a multiple of every BLOCK_KEYS
WORKSPACE_BYTES = 128 << 20  # larger batches walk all keys in one program
ENOUGH_PROGRAMS = 256  # tiles of prompts at which nothing is split: they fill a device
PROGRAMS = 1024  # of a split grid: some waves of the largest GPU; a program takes parts in turn
MERGED_PARTS = 16  # at a time
FEWEST_PADDED = 16  # sequences that a kernel is made for: each power of two is one more to compile
LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1.0e30)  # below any score, and finite: differences of it are 0, not NaN
# What changes from one step to the next, and with it in Triton's eyes the kernel: a few values and
# multiples of 16 are compiled apart. These are compiled once for all.
_OF_A_STEP = ("sequences", "table_row", "parts")


@triton.jit
def _sequence_of(query_start, step, index, sequences, PADDED: tl.constexpr):
    """Last sequence b whose first tile, query_start[b] // step + b, is at most `index`.

    Each sequence may waste part of a tile, so tiles are numbered with one to spare for each.
    """
    b = tl.arange(0, PADDED)
    first = tl.load(query_start + b, mask=b < sequences, other=0) // step + b
    return tl.sum(((first <= index) & (b < sequences)).to(tl.int32), 0) - 1


@triton.jit
def _searched(query_start, step, index, sequences):
    """As `_sequence_of`, one after the other.

    All threads see it take the same way, so addresses and bounds that follow from it are not kept
    for each: at heads of 512 the other spills seven times as much and takes twice as long.
    """
    low, high = 0, sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // step + middle <= index:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _walk(
    queries,  # [ROWS, KEY_BLOCK]
    position,  # [ROWS]
    table,
    k_pages,  # of one head
    v_pages,
    begin,
    low,
    high,
    total,  # [ROWS, VALUE_BLOCK] fp32, before the first key
    peak,  # [ROWS] fp32; base 2
    mass,  # [ROWS] fp32
    scale,
    softcap,
    window,
    k_page,
    k_token,
    v_page,
    v_token,
    TOKENS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    FP32: tl.constexpr,
    SEEN: tl.constexpr,  # by every query, and in whole steps
):
    """Attend to keys low..high, `begin` on in steps: weighted values, their maximum and sum."""
    dk, dv = tl.arange(0, KEY_BLOCK), tl.arange(0, VALUE_BLOCK)
    for at in range(begin, high, KEYS):
        key = at + tl.arange(0, KEYS)
        present = (key >= low) & (key < high)
        if SEEN:
            present = key >= 0
        page = tl.load(table + key // TOKENS, mask=present, other=0).to(tl.int64)
        slot = key % TOKENS
        k_rows = k_pages + page * k_page + slot * k_token
        keys = tl.load(
            k_rows[None, :] + dk[:, None],
            mask=present[None, :] & (dk < KEY_SIZE)[:, None],
            other=0.0,
        )
        v_rows = v_pages + page * v_page + slot * v_token
        values = tl.load(
            v_rows[:, None] + dv[None, :],
            mask=present[:, None] & (dv < VALUE_SIZE)[None, :],
            other=0.0,
        )
        if FP32:
            keys, values = keys.to(tl.float32), values.to(tl.float32)
        score = tl.dot(queries, keys, input_precision="ieee")
        if HAS_SOFTCAP:
            score = softcap * (2 * tl.sigmoid(2 * (score * scale) / softcap) - 1) * LOG2E
        else:
            score *= scale * LOG2E
        if not SEEN:
            visible = present[None, :] & (key[None, :] <= position[:, None])
            if HAS_WINDOW:
                visible &= key[None, :] > position[:, None] - window
            score = tl.where(visible, score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 1))
        weight = tl.exp2(score - higher[:, None])
        shrink = tl.exp2(peak - higher)
        mass = mass * shrink + tl.sum(weight, 1)
        total = tl.dot(
            weight.to(values.dtype), values, total * shrink[:, None], input_precision="ieee"
        )
        peak = higher
    return total, peak, mass


@triton.jit(do_not_specialize=_OF_A_STEP, do_not_specialize_on_alignment=("block_tables",))
def attention_kernel(
    q,  # [T, Hq, Dk]
    k_pages,  # [P, tok, Hkv, Dk]
    v_pages,  # [P, tok, Hkv, Dv]
    block_tables,  # [B, M] int32
    query_start,  # [B+1] int32
    seq_lens,  # [B] int32
    sinks,  # [Hq] fp32, or anything if not HAS_SINKS
    out,  # [T, Hq, Dv]; or [T, Hq, parts, Dv] fp32 if SPLIT
    extremes,  # [T, Hq, parts, 2] fp32: maximum (base 2) and sum, if SPLIT
    scale,
    softcap,
    window,
    q_token,
    q_head,
    k_page,
    k_token,
    k_head,
    v_page,
    v_token,
    v_head,
    table_row,
    parts,
    sequences,  # B
    PADDED_SEQUENCES: tl.constexpr,
    HEADS: tl.constexpr,  # Hq
    GROUP: tl.constexpr,  # Hq / Hkv
    TOKENS: tl.constexpr,  # of a page
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,  # Dk as a power of two
    VALUE_BLOCK: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    QUERIES: tl.constexpr,  # of a tile
    ROWS: tl.constexpr,  # QUERIES * PADDED_GROUP
    KEYS: tl.constexpr,  # of one step
    SPLIT: tl.constexpr,  # keys of a part, 0 for one part
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    FP32: tl.constexpr,  # multiply in fp32
):
    """Attention of one tile of queries over its keys, or over some parts of them, each alone."""
    tile, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)  # long ones first
    if SPLIT > 0:
        sequence = _sequence_of(query_start, QUERIES, tile, sequences, PADDED_SEQUENCES)
    else:
        sequence = _searched(query_start, QUERIES, tile, sequences)
    start = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - start
    first = (tile - start // QUERIES - sequence) * QUERIES  # among the sequence's queries
    if first >= count:
        return
    length = tl.load(seq_lens + sequence)
    last_query = tl.minimum(first + QUERIES, count) - 1
    low = 0
    high = length - count + last_query + 1
    if HAS_WINDOW:
        low = tl.maximum(0, length - count + first - window + 1)
    row = tl.arange(0, ROWS)
    query = first + row // PADDED_GROUP
    head = kv_head * GROUP + row % PADDED_GROUP
    used = (query < count) & (row % PADDED_GROUP < GROUP)
    position = length - count + query
    dk, dv = tl.arange(0, KEY_BLOCK), tl.arange(0, VALUE_BLOCK)
    token = (start + query).to(tl.int64)
    q_rows = q + token * q_token + head * q_head
    queries = tl.load(
        q_rows[:, None] + dk[None, :], mask=used[:, None] & (dk < KEY_SIZE)[None, :], other=0.0
    )
    if FP32:
        queries = queries.to(tl.float32)
    table = block_tables + sequence.to(tl.int64) * table_row
    k_pages += kv_head * k_head
    v_pages += kv_head * v_head
    begin = low // KEYS * KEYS
    if SPLIT > 0:
        for part in range(
            low // SPLIT + tl.program_id(2), tl.cdiv(high, SPLIT), tl.num_programs(2)
        ):
            total, peak, mass = _walk(
                queries, position, table, k_pages, v_pages, tl.maximum(begin, part * SPLIT), low,
                tl.minimum(high, (part + 1) * SPLIT),
                tl.zeros((ROWS, VALUE_BLOCK), dtype=tl.float32),
                tl.full((ROWS,), LOWEST, dtype=tl.float32), tl.zeros((ROWS,), dtype=tl.float32),
                scale, softcap, window, k_page, k_token, v_page, v_token, TOKENS, KEY_SIZE,
                VALUE_SIZE, KEY_BLOCK, VALUE_BLOCK, KEYS, HAS_WINDOW, HAS_SOFTCAP, FP32,
                SEEN=False,
            )  # fmt: skip
            target = (token * HEADS + head) * parts + part
            tl.store(extremes + target * 2, peak, mask=used)
            tl.store(extremes + target * 2 + 1, mass, mask=used)
            tl.store(
                out + target[:, None] * VALUE_SIZE + dv[None, :],
                total,
                mask=used[:, None] & (dv < VALUE_SIZE)[None, :],
            )
    else:
        peak = tl.full((ROWS,), LOWEST, dtype=tl.float32)
        mass = tl.zeros((ROWS,), dtype=tl.float32)
        if HAS_SINKS:
            peak = tl.load(sinks + head, mask=used, other=0.0) * LOG2E
            mass += 1.0
        total = tl.zeros((ROWS, VALUE_BLOCK), dtype=tl.float32)
        # Of a tile's steps only the last, and with a window the first, have keys that not every
        # query sees; the others need no mask.
        whole_from, whole_until = begin, (length - count + first + 1) // KEYS * KEYS
        if HAS_WINDOW:
            all_see = tl.maximum(0, length - count + last_query - window + 1)
            whole_from = tl.minimum(tl.cdiv(all_see, KEYS) * KEYS, high)
            whole_until = tl.maximum(whole_from, whole_until)
        for stretch in tl.static_range(0 if HAS_WINDOW else 1, 3):
            until = whole_from if stretch == 0 else whole_until if stretch == 1 else high
            total, peak, mass = _walk(
                queries, position, table, k_pages, v_pages, begin, low, until, total, peak, mass,
                scale, softcap, window, k_page, k_token, v_page, v_token, TOKENS, KEY_SIZE,
                VALUE_SIZE, KEY_BLOCK, VALUE_BLOCK, KEYS, HAS_WINDOW, HAS_SOFTCAP, FP32,
                SEEN=stretch == 1,
            )  # fmt: skip
            begin = until
        total = total / tl.where(used, mass, 1.0)[:, None]
        target = token * HEADS + head
        tl.store(
            out + target[:, None] * VALUE_SIZE + dv[None, :],
            total.to(out.dtype.element_ty),
            mask=used[:, None] & (dv < VALUE_SIZE)[None, :],
        )


@triton.jit(do_not_specialize=("sequences", "parts"))
def merge_kernel(
    partial,  # [T, Hq, parts, Dv] fp32
    extremes,  # [T, Hq, parts, 2] fp32
    query_start,  # [B+1] int32
    seq_lens,  # [B] int32
    sinks,  # [Hq] fp32, or anything if not HAS_SINKS
    out,  # [T, Hq, Dv]
    window,
    parts,
    sequences,  # B
    PADDED_SEQUENCES: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    MERGED: tl.constexpr,  # parts of one turn
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Merge the parts of one (query, head) in fixed turns; zero where there is no sequence."""
    token, head = tl.program_id(0), tl.program_id(1)
    b = tl.arange(0, PADDED_SEQUENCES)
    starts = tl.load(query_start + b, mask=b < sequences, other=0)
    sequence = tl.sum(((starts <= token) & (b < sequences)).to(tl.int32), 0) - 1
    end = tl.load(query_start + sequence + 1)
    position = tl.load(seq_lens + sequence) - end + token
    dv = tl.arange(0, VALUE_BLOCK)
    row = token.to(tl.int64) * HEADS + head
    total = tl.zeros((VALUE_BLOCK,), dtype=tl.float32)
    peak = tl.full((), LOWEST, tl.float32)
    mass = tl.full((), 0.0, tl.float32)
    if HAS_SINKS:
        peak = tl.load(sinks + head) * LOG2E
        mass += 1.0
    low = 0
    if HAS_WINDOW:
        low = tl.maximum(0, position - window + 1)
    first, high = low // SPLIT, tl.where(token < end, position // SPLIT + 1, 0)
    for start in range(first // MERGED * MERGED, high, MERGED):
        part = start + tl.arange(0, MERGED)
        there = (part >= first) & (part < high)
        at = row * parts + part
        peaks = tl.load(extremes + at * 2, mask=there, other=LOWEST)
        masses = tl.load(extremes + at * 2 + 1, mask=there, other=0.0)
        values = tl.load(
            partial + at[:, None] * VALUE_SIZE + dv[None, :],
            mask=there[:, None] & (dv < VALUE_SIZE)[None, :],
            other=0.0,
        )
        higher = tl.maximum(peak, tl.max(peaks, 0))
        shrink, grow = tl.exp2(peak - higher), tl.exp2(peaks - higher)
        total = total * shrink + tl.sum(values * grow[:, None], 0)
        mass = mass * shrink + tl.sum(masses * grow, 0)
        peak = higher
    total = tl.where(token < end, total / tl.where(token < end, mass, 1.0), 0.0)
    tl.store(out + row * VALUE_SIZE + dv, total.to(out.dtype.element_ty), mask=dv < VALUE_SIZE)


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As `reference.paged_attention`; products are in the pages' dtype where `q` has it too."""
    tokens, heads, key_size = q.shape
    page_tokens, kv_heads, value_size = v_pages.shape[1:]
    sequences, blocks = block_tables.shape
    out = torch.empty(tokens, heads, value_size, dtype=q.dtype, device=q.device)
    if not tokens or not sequences:
        return out.zero_()
    if q.stride(-1) != 1:
        q = q.contiguous()
    if block_tables.stride(1) != 1:
        block_tables = block_tables.contiguous()
    query_start, seq_lens = query_start.contiguous(), seq_lens.contiguous()
    group = heads // kv_heads
    fp32 = not q.dtype == k_pages.dtype == v_pages.dtype or q.dtype == torch.float32
    sizes = max(key_size, value_size), 4 if fp32 else 2
    shape = tile_shape(tokens, sequences, group, *sizes, q.device)
    tiles = tokens // shape["QUERIES"] + sequences
    parts = triton.cdiv(blocks * page_tokens, SPLIT_KEYS)
    split = (
        parts > 1
        and (tokens <= sequences or tiles * kv_heads < ENOUGH_PROGRAMS)
        and tokens * heads * parts * (value_size + 2) * 4 <= WORKSPACE_BYTES
    )
    common: dict[str, Any] = {
        "PADDED_SEQUENCES": max(FEWEST_PADDED, triton.next_power_of_2(sequences) if split else 0),
        "HEADS": heads, "VALUE_SIZE": value_size,
        "VALUE_BLOCK": max(SMALLEST_DOT, triton.next_power_of_2(value_size)),
        "SPLIT": SPLIT_KEYS if split else 0, "HAS_WINDOW": window is not None,
    }  # fmt: skip
    sink_scores = seq_lens if sinks is None else sinks.float().contiguous()
    target = extremes = out
    if split:
        rows = (tokens, heads, parts)
        target = torch.empty(*rows, value_size, dtype=torch.float32, device=q.device)
        extremes = torch.empty(*rows, 2, dtype=torch.float32, device=q.device)
    else:
        out.zero_()
    programs = min(parts, -(-PROGRAMS // (tiles * kv_heads))) if split else 1
    grid = (tiles, kv_heads, programs)
    attention_kernel[grid](
        q, k_pages, v_pages, block_tables, query_start, seq_lens, sink_scores, target, extremes,
        scale, softcap or 0.0, window or 0, *q.stride()[:2], *k_pages.stride()[:3],
        *v_pages.stride()[:3], block_tables.stride(0), parts, sequences,
        GROUP=group, TOKENS=page_tokens, KEY_SIZE=key_size,
        KEY_BLOCK=max(SMALLEST_DOT, triton.next_power_of_2(key_size)),
        HAS_SOFTCAP=softcap is not None, HAS_SINKS=sinks is not None and not split,
        FP32=fp32, **common, **shape,
    )  # fmt: skip
    if split:
        merge_kernel[(tokens, heads)](
            target, extremes, query_start, seq_lens, sink_scores, out, window or 0, parts,
            sequences, MERGED=MERGED_PARTS, HAS_SINKS=sinks is not None, **common,
        )  # fmt: skip
    return out
