"""`descents.descend` in Triton: a program takes some rows through all columns in one launch.

In torch a column takes a dozen launches, and the tables are read again for each.

Axes: E blocks, N rows, W widths, C levels of all widths' tables side by side, S columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ENTRIES = 4096  # distances that a program holds


@triton.jit
def descend_kernel(
    scaled,  # [E, N, C] float32, tables times roots
    tables,  # [E, N, C] float32
    roots,  # [E, N, W] float32
    hessians,  # [E, S, S] float32
    levels,  # [E, N, W, S] float32, columns side by side
    pulls,  # the same
    codes,  # [E, N, S] uint8
    falls,  # [E, N, W, S] float32
    rows,
    level_row,  # strides of levels: of a row, of a width
    level_width,
    pull_row,
    pull_width,
    MIN_BITS: tl.constexpr,
    WIDTHS: tl.constexpr,
    PADDED: tl.constexpr,  # WIDTHS, a power of two
    LEVELS: tl.constexpr,  # 2^max_bits
    COLUMNS: tl.constexpr,  # S
    PADDED_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,  # of a program
):
    """Some rows of a block through all columns."""
    block = tl.program_id(0).to(tl.int64)
    inner = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row, inside = block * rows + inner, inner < rows
    width, column = tl.arange(0, PADDED), tl.arange(0, PADDED_COLUMNS)
    every = tl.arange(0, LEVELS)
    size: tl.constexpr = 2 * LEVELS - (1 << MIN_BITS)  # C
    some = inside[:, None] & (width < WIDTHS)[None, :]
    place = row[:, None] * WIDTHS + width[None, :]
    root = tl.load(roots + place, mask=some, other=0.0)
    at_level = row[:, None] * level_row + width[None, :] * level_width
    at_pull = row[:, None] * pull_row + width[None, :] * pull_width
    all_of = some[:, :, None] & (column < COLUMNS)[None, None, :]
    level = tl.load(levels + at_level[:, :, None] + column[None, None, :], mask=all_of, other=0.0)
    pull = tl.load(pulls + at_pull[:, :, None] + column[None, None, :], mask=all_of, other=0.0)
    offset = (1 << (MIN_BITS + width)) - (1 << MIN_BITS)
    shift = tl.maximum(WIDTHS - 1 - width, 0)
    hessians += block * COLUMNS * COLUMNS
    for step in range(COLUMNS):
        here = (column == step)[None, None, :]
        own_level = tl.sum(tl.where(here, level, 0.0), 2)
        own_pull = tl.sum(tl.where(here, pull, 0.0), 2)
        want = (own_level + own_pull / tl.load(hessians + step * COLUMNS + step)) * root
        cost = tl.zeros([ROWS, LEVELS], dtype=tl.float32)
        for index in tl.static_range(WIDTHS):
            entry = (1 << (MIN_BITS + index)) - (1 << MIN_BITS) + (every >> (WIDTHS - 1 - index))
            found = tl.load(
                scaled + row[:, None] * size + entry[None, :], mask=inside[:, None], other=0.0
            )
            gap = found - tl.sum(tl.where(width[None, :] == index, want, 0.0), 1)[:, None]
            cost += gap * gap
        packed = (cost.to(tl.int32, bitcast=True) & -256) | every[None, :]
        code = tl.min(packed, 1) & 255
        tl.store(codes + row * COLUMNS + step, code.to(tl.uint8), mask=inside)
        entry = offset[None, :] + (code[:, None] >> shift[None, :])
        fall = own_level - tl.load(tables + row[:, None] * size + entry, mask=some, other=0.0)
        tl.store(falls + place * COLUMNS + step, fall, mask=some)
        coupling = tl.load(
            hessians + step * COLUMNS + column, mask=(column > step) & (column < COLUMNS), other=0.0
        )
        pull += fall[:, :, None] * coupling[None, None, :]


def descend(
    tables: Tensor,
    scaled: Tensor,
    roots: Tensor,
    hessians: Tensor,
    levels: Tensor,
    pulls: Tensor,
    min_bits: int,
) -> tuple[Tensor, Tensor]:
    """See `descents.descend`."""
    blocks, count, widths, columns = levels.shape
    levels, pulls = (_rows_side_by_side(tensor) for tensor in (levels, pulls))
    codes = torch.empty((blocks, count, columns), dtype=torch.uint8, device=tables.device)
    falls = torch.empty((blocks, count, widths, columns), device=tables.device)
    most = 1 << (min_bits + widths - 1)
    rows = max(1, _ENTRIES // most)
    descend_kernel[(blocks, triton.cdiv(count, rows))](
        scaled.contiguous(),
        tables.contiguous(),
        roots.contiguous(),
        hessians.contiguous(),
        levels,
        pulls,
        codes,
        falls,
        count,
        levels.stride(1),
        levels.stride(2),
        pulls.stride(1),
        pulls.stride(2),
        MIN_BITS=min_bits,
        WIDTHS=widths,
        PADDED=triton.next_power_of_2(widths),
        LEVELS=most,
        COLUMNS=columns,
        PADDED_COLUMNS=triton.next_power_of_2(columns),
        ROWS=rows,
    )
    return codes, falls


def _rows_side_by_side(tensor: Tensor) -> Tensor:
    """[E, N, W, S] whose rows follow each other through all blocks, at one stride."""
    regular = tensor.stride(3) == 1 and tensor.stride(0) == tensor.shape[1] * tensor.stride(1)
    return tensor if regular else tensor.contiguous()
