"""`codes.nearest_codes` in Triton: tables are read once and nothing else is written than codes.

In torch every table entry passes through memory some ten times for each column of a fit.

Axes: R rows, W widths, C levels of all widths' tables side by side.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ENTRIES = 4096  # distances that a program holds


@triton.jit
def nearest_codes_kernel(
    tables,  # [R, C] float32
    wanted,  # [R, W] float32
    codes,  # [R] uint8
    rows,
    MIN_BITS: tl.constexpr,
    WIDTHS: tl.constexpr,
    LEVELS: tl.constexpr,  # 2^max_bits
    ROWS: tl.constexpr,  # of a program
):
    """Some rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    code = tl.arange(0, LEVELS)
    size = 2 * LEVELS - (1 << MIN_BITS)  # C
    cost = tl.zeros([ROWS, LEVELS], dtype=tl.float32)
    for width in tl.static_range(WIDTHS):
        offset = (1 << (MIN_BITS + width)) - (1 << MIN_BITS)
        place = offset + (code >> (WIDTHS - 1 - width))
        level = tl.load(
            tables + row[:, None] * size + place[None, :], mask=inside[:, None], other=0.0
        )
        want = tl.load(wanted + row * WIDTHS + width, mask=inside, other=0.0)
        gap = level - want[:, None]
        cost += gap * gap
    packed = (cost.to(tl.int32, bitcast=True) & -256) | code[None, :]
    tl.store(codes + row, (tl.min(packed, 1) & 255).to(tl.uint8), mask=inside)


def nearest_codes(tables: Tensor, wanted: Tensor, min_bits: int) -> Tensor:
    """See `codes.nearest_codes`."""
    widths = wanted.shape[-1]
    levels = 1 << (min_bits + widths - 1)
    tables = tables.contiguous()
    codes = torch.empty(wanted.shape[:-1], dtype=torch.uint8, device=tables.device)
    rows = max(1, _ENTRIES // levels)
    nearest_codes_kernel[(triton.cdiv(codes.numel(), rows),)](
        tables,
        wanted.contiguous(),
        codes,
        codes.numel(),
        MIN_BITS=min_bits,
        WIDTHS=widths,
        LEVELS=levels,
        ROWS=rows,
    )
    return codes
