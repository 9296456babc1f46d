"""Paged attention and KV writes on the CPU, in numba.

One query at a time: scores of the heads that share a key head, softmax, then the weighted sum of
values, each read from its page once per key head. The order of every sum depends on the query's
own position alone, so its result is the same in any batch and any chunking of the prompt.
Axes as in `reference.py`; heads are vectors of 16 lanes, so Dk and Dv are multiples of 16.
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

_NANOSECONDS = 0.08  # rough cost per key, head and element on one core, to tell when threads pay
_NO_SINKS = np.zeros(0, np.float32)

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Longs = NDArray[np.int64]


@njit
def _score_keys(
    q: Floats,
    query: int,  # first element of the query's head
    k_pages: Any,
    key: int,  # first element of the first key
    step: int,  # elements from a key to the next
    count: int,  # keys, all in one page
    scale: float,
    scores: Floats,
    at: int,  # scores go to elements at, at + 1, ...
) -> None:
    """Scores of one head against the keys of one page, four keys at once."""
    zero = simd.splat(np.float32(0))
    for t in range(0, count, 4):
        k0 = key + t * step
        k1 = key + min(t + 1, count - 1) * step
        k2 = key + min(t + 2, count - 1) * step
        k3 = key + min(t + 3, count - 1) * step
        a0, a1, a2, a3 = zero, zero, zero, zero
        for d in range(0, k_pages.shape[3], simd.LANES):
            value = simd.load(q, query + d)
            a0 = simd.fma(simd.load(k_pages, k0 + d), value, a0)
            a1 = simd.fma(simd.load(k_pages, k1 + d), value, a1)
            a2 = simd.fma(simd.load(k_pages, k2 + d), value, a2)
            a3 = simd.fma(simd.load(k_pages, k3 + d), value, a3)
        s0, s1, s2, s3 = simd.sums(a0, a1, a2, a3)
        # four stores even where fewer keys are left: later scores overwrite what was too much
        scores[at + t] = s0 * scale
        scores[at + t + 1] = s1 * scale
        scores[at + t + 2] = s2 * scale
        scores[at + t + 3] = s3 * scale


@njit
def _add_values(
    scores: Floats,
    at: int,
    v_pages: Any,
    value: int,  # first element of the first value
    step: int,
    count: int,
    out: Floats,
    target: int,  # first element of the output head
) -> None:
    """Add the weighted values of one page to one output head."""
    size = v_pages.shape[3]
    wide = size - size % (4 * simd.LANES)
    for d in range(0, wide, 4 * simd.LANES):
        a0, a1 = simd.load(out, target + d), simd.load(out, target + d + 16)
        a2, a3 = simd.load(out, target + d + 32), simd.load(out, target + d + 48)
        for t in range(count):
            weight = simd.splat(scores[at + t])
            source = value + t * step + d
            a0 = simd.fma(simd.load(v_pages, source), weight, a0)
            a1 = simd.fma(simd.load(v_pages, source + 16), weight, a1)
            a2 = simd.fma(simd.load(v_pages, source + 32), weight, a2)
            a3 = simd.fma(simd.load(v_pages, source + 48), weight, a3)
        simd.store(out, target + d, a0)
        simd.store(out, target + d + 16, a1)
        simd.store(out, target + d + 32, a2)
        simd.store(out, target + d + 48, a3)
    for d in range(wide, size, simd.LANES):
        a0 = simd.load(out, target + d)
        for t in range(count):
            weight = simd.splat(scores[at + t])
            a0 = simd.fma(simd.load(v_pages, value + t * step + d), weight, a0)
        simd.store(out, target + d, a0)


@njit
def _softmax(scores: Floats, at: int, count: int, softcap: float, sink: float) -> Any:
    """Turn scores into unnormalized weights in place; returns the factor that normalizes them.

    `softcap` 0 means none, `sink` -inf means none.
    """
    end = at + -(-count // simd.LANES) * simd.LANES
    for i in range(at + count, end):
        scores[i] = -np.inf
    peak = simd.splat(np.float32(sink))
    for i in range(at, end, simd.LANES):
        value = simd.load(scores, i)
        if softcap > 0:  # c * tanh(s / c) = 2c * sigmoid(2s / c) - c
            turned = simd.mul(value, simd.splat(np.float32(2 / softcap)))
            doubled = simd.swish(simd.splat(np.float32(2 * softcap)), turned)
            one = simd.splat(np.float32(1))
            value = simd.fma(doubled, one, simd.splat(np.float32(-softcap)))
            simd.store(scores, i, value)
        peak = simd.maximum(peak, value)
    for i in range(at + count, end):
        scores[i] = -np.inf
    top = simd.lane_max(peak)
    total = simd.splat(np.float32(0))
    one = simd.splat(np.float32(1))
    for i in range(at, end, simd.LANES):
        value = simd.exp(simd.fma(simd.load(scores, i), one, simd.splat(-top)))
        simd.store(scores, i, value)
        total = simd.fma(value, one, total)
    return 1 / (simd.lane_sum(total) + math.exp(sink - top))


@njit
def _attend_one(
    q: Floats,
    k_pages: Any,
    v_pages: Any,
    table: Ints,  # [M]
    token: int,  # row of q and out
    low: int,  # first visible position
    high: int,  # position after the last visible one
    scale: float,
    softcap: float,
    sinks: Floats,
    scores: Floats,  # [Hq * pitch] scratch
    pitch: int,
    out: Floats,
) -> None:
    """All heads of one query. Pages are the outer loop: each is read once, front to back."""
    heads, size, page_tokens = q.shape[1], q.shape[2], k_pages.shape[1]
    group = heads // k_pages.shape[2]
    key_page, key_step, key_head, _ = k_pages.strides
    value_page, value_step, value_head, _ = v_pages.strides
    key_item, value_item = k_pages.itemsize, v_pages.itemsize
    for block in range(low // page_tokens, (high - 1) // page_tokens + 1):
        begin = max(low, block * page_tokens)
        count = min(high, (block + 1) * page_tokens) - begin
        start = table[block] * key_page + (begin - block * page_tokens) * key_step
        for h in range(heads):
            query = (token * heads + h) * size
            key = (start + h // group * key_head) // key_item
            step, at = key_step // key_item, h * pitch + begin - low
            _score_keys(q, query, k_pages, key, step, count, scale, scores, at)
    for h in range(heads):
        sink = sinks[h] if sinks.shape[0] else np.float32(-np.inf)
        factor = _softmax(scores, h * pitch, high - low, softcap, sink)
        for i in range(h * pitch, h * pitch + high - low):
            scores[i] *= factor
    for block in range(low // page_tokens, (high - 1) // page_tokens + 1):
        begin = max(low, block * page_tokens)
        count = min(high, (block + 1) * page_tokens) - begin
        start = table[block] * value_page + (begin - block * page_tokens) * value_step
        for h in range(heads):
            target = (token * heads + h) * v_pages.shape[3]
            value = (start + h // group * value_head) // value_item
            step, at = value_step // value_item, h * pitch + begin - low
            _add_values(scores, at, v_pages, value, step, count, out, target)


@njit(cache=True, nogil=True)
def _attention(
    begin: int,  # queries begin to end - 1 are run
    end: int,
    q: Floats,  # [T, Hq, Dk]
    k_pages: Any,  # [P, tok, Hkv, Dk] float32, or uint16 that holds bf16
    v_pages: Any,  # [P, tok, Hkv, Dv]
    block_tables: Ints,  # [B, M]
    query_start: Ints,  # [B + 1]
    seq_lens: Ints,  # [B]
    scale: float,
    window: int,  # 0 for none
    softcap: float,  # 0 for none
    sinks: Floats,  # [Hq] or [0]
    scores: Floats,
    pitch: int,
    out: Floats,  # [T, Hq, Dv], zeros
) -> None:
    for b in range(seq_lens.shape[0]):
        first = seq_lens[b] - (query_start[b + 1] - query_start[b])
        for token in range(max(begin, query_start[b]), min(end, query_start[b + 1])):
            high = first + (token - query_start[b]) + 1
            low = max(0, high - window) if window > 0 else 0
            _attend_one(q, k_pages, v_pages, block_tables[b], token, low, high,
                        scale, softcap, sinks, scores, pitch, out)  # fmt: skip


@njit(cache=True, nogil=True)
def _write(k: Any, v: Any, k_pages: Any, v_pages: Any, slots: Longs) -> None:
    page_tokens = k_pages.shape[1]
    for token in range(slots.shape[0]):
        if slots[token] < 0:
            continue
        page, offset = slots[token] // page_tokens, slots[token] % page_tokens
        for head in range(k.shape[1]):
            for d in range(k.shape[2]):
                k_pages[page, offset, head, d] = k[token, head, d]
            for d in range(v.shape[2]):
                v_pages[page, offset, head, d] = v[token, head, d]


def _raw(tensor: Tensor) -> NDArray[Any]:
    """NumPy view of a float32 tensor, or of the bits of a bf16 one."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    return tensor.numpy()


def write_kv(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """As `reference.write_kv`, for float32 or bf16 pages on the CPU."""
    k, v = k.to(k_pages.dtype).contiguous(), v.to(v_pages.dtype).contiguous()
    _write(_raw(k), _raw(v), _raw(k_pages), _raw(v_pages), slots.numpy())


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
    """As `reference.paged_attention`, for float32 or bf16 pages on the CPU.

    Dk and Dv must be multiples of 16 and the last axis of the pages contiguous.
    """
    tokens, heads, size = q.shape
    out = np.zeros((tokens, heads, v_pages.shape[3]), np.float32)
    starts, lengths = query_start.contiguous().numpy(), seq_lens.contiguous().numpy()
    longest = int(lengths.max(initial=0))
    pitch = -(-longest // simd.LANES) * simd.LANES + simd.LANES
    sink_scores = _NO_SINKS if sinks is None else sinks.float().contiguous().numpy()
    shared = (
        q.float().contiguous().numpy(),
        _raw(k_pages),
        _raw(v_pages),
        block_tables.contiguous().numpy(),
        starts,
        lengths,
        scale,
        window or 0,
        softcap or 0.0,
        sink_scores,
    )

    def run_range(begin: int, end: int) -> None:
        _attention(begin, end, *shared, np.empty(heads * pitch, np.float32), pitch, out)

    key_cost = heads * (size + v_pages.shape[3]) * _NANOSECONDS
    shares = _shares(starts, lengths, window or longest, key_cost)
    threads.run([partial(run_range, begin, end) for begin, end in shares])
    return torch.from_numpy(out).to(q.dtype)


def _shares(starts: Ints, lengths: Ints, window: int, key_cost: float) -> list[tuple[int, int]]:
    """Ranges of queries for the threads; a query costs by the keys that it sees."""
    tokens = int(starts[-1])
    if tokens * min(window, int(lengths.max(initial=0))) * key_cost < threads.WORTH_NANOSECONDS:
        return [(0, tokens)]
    counts = np.diff(starts)
    positions = np.arange(tokens) + np.repeat(lengths - starts[1:], counts)
    return threads.split(np.minimum(positions + 1, window) * key_cost)
