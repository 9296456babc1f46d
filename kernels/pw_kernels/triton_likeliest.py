"""`likeliest.likeliest` in Triton: one launch that reads the logits once, in place of eight."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 8192  # held at a time
_WARPS = 16


@triton.jit
def likeliest_kernel(
    logits,  # [S, V]
    tokens,  # [S] int64
    row_stride,
    vocabulary,
    columns,  # V
    COLUMNS: tl.constexpr,
):
    """One row."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * row_stride
    lane = tl.arange(0, COLUMNS)
    best = tl.full([COLUMNS], -float("inf"), tl.float32)
    place = lane
    broken = tl.zeros([COLUMNS], tl.int32)
    for start in range(0, columns, COLUMNS):
        column = start + lane
        value = tl.load(logits + column, mask=column < columns, other=0.0).to(tl.float32)
        broken |= (tl.abs(value) < float("inf")).to(tl.int32) ^ 1  # nor is NaN
        better = (column < vocabulary) & (value > best)
        best = tl.where(better, value, best)
        place = tl.where(better, column, place)
    most = tl.max(best, 0)
    token = tl.min(tl.where(best == most, place, columns), 0)
    tl.store(tokens + row, tl.where(tl.max(broken, 0) > 0, -1, token).to(tl.int64))


def likeliest(logits: Tensor, vocabulary: int) -> Tensor:
    """See `likeliest.likeliest`."""
    rows, columns = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    likeliest_kernel[(rows,)](
        logits, tokens, logits.stride(0), vocabulary, columns, COLUMNS=_COLUMNS, num_warps=_WARPS
    )
    return tokens
