"""Grouped matmul of slots with plain matrices, one for each expert, in Triton. Knows no planes."""

from __future__ import annotations

import triton
import triton.language as tl

from pw_kernels.triton_moe import _activate


@triton.jit
def grouped_kernel(
    x,  # [T, K], or [S, K] with TOP_K = 1
    matrices,  # [last - first, N, K]
    out,  # [S, N / 2] if GATED, else [S, N] fp32
    work,  # [G, 4] int32: group, expert or -1, and two more
    group_slots,  # [G, SLOTS] int32, S for an unused place
    bias,  # [E, N] fp32, or anything if not HAS_BIAS
    weights,  # [S] fp32
    slot_count,  # S
    first,
    last,
    TOP_K: tl.constexpr,
    COLS: tl.constexpr,
    ALL_ROWS: tl.constexpr,  # N
    WIDTH: tl.constexpr,  # columns of out
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """GATED: act(gate x) * (up x); else weight * (down x). Only experts first to last."""
    expert = tl.load(work + tl.program_id(1) * 4 + 1)
    if (expert < first) | (expert >= last):
        return
    group = tl.load(work + tl.program_id(1) * 4)
    slots = tl.load(group_slots + group * SLOTS + tl.arange(0, SLOTS))
    used = slots < slot_count
    # a gated tile takes gate rows in its first half and the up rows that go with them in its second
    PART: tl.constexpr = ROWS // 2 if GATED else ROWS
    i = tl.arange(0, ROWS)
    rows = tl.minimum(tl.program_id(0) * PART + i % PART, WIDTH - 1) + i // PART * WIDTH
    k = tl.arange(0, STEP)
    x_rows = x + tl.where(used, slots // TOP_K, 0).to(tl.int64)[:, None] * COLS
    blocks = matrices + (expert - first).to(tl.int64) * (ALL_ROWS * COLS) + rows[None, :] * COLS
    total = tl.zeros((SLOTS, ROWS), dtype=tl.float32)
    for start in range(0, COLS, STEP):
        at = start + k
        inside = at < COLS
        inputs = tl.load(x_rows + at[None, :], mask=inside[None, :], other=0.0)
        block = tl.load(blocks + at[:, None], mask=inside[:, None], other=0.0)
        total = tl.dot(inputs, block, total, input_precision="ieee")  # of fp32 all digits
    if HAS_BIAS:
        total += tl.load(bias + expert * ALL_ROWS + rows)[None, :]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(total, (SLOTS, 2, PART)), (0, 2, 1)))
        result = _activate(gate, up, KIND)
    else:
        result = total * tl.load(weights + slots, mask=used, other=0.0)[:, None]
    columns = tl.program_id(0) * PART + tl.arange(0, PART)
    present = columns < WIDTH
    target = out + slots.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=used[:, None] & present[None, :])
