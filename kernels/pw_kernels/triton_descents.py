"""`descents.descend` in Triton: a warp takes a row through all columns in one launch.

In torch a column takes a dozen launches, and the tables are read again for each.

Axes: E blocks, N rows, W widths, C levels of all widths' tables side by side, S columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


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
):
    """One row through all columns: its tables and pulls stay in the registers of a warp."""
    row = tl.program_id(0).to(tl.int64)
    hessians += row // rows * COLUMNS * COLUMNS
    size: tl.constexpr = 2 * LEVELS - (1 << MIN_BITS)  # C
    scaled += row * size
    tables += row * size
    width, column, code = tl.arange(0, PADDED), tl.arange(0, PADDED_COLUMNS), tl.arange(0, LEVELS)
    offset, shift = (1 << (MIN_BITS + width)) - (1 << MIN_BITS), WIDTHS - 1 - width
    some, shift = width < WIDTHS, tl.maximum(shift, 0)
    every = tl.load(
        scaled + offset[:, None] + (code[None, :] >> shift[:, None]), mask=some[:, None], other=0.0
    )
    root = tl.load(roots + row * WIDTHS + width, mask=some, other=0.0)
    inside = some[:, None] & (column < COLUMNS)[None, :]
    levels += row * level_row + width * level_width
    at_pull = row * pull_row + width[:, None] * pull_width + column[None, :]
    pull = tl.load(pulls + at_pull, mask=inside, other=0.0)
    for step in range(COLUMNS):
        here = (column == step)[None, :]
        own_level = tl.load(levels + step, mask=some, other=0.0)
        own_pull = tl.sum(tl.where(here, pull, 0.0), 1)
        wanted = (own_level + own_pull / tl.load(hessians + step * COLUMNS + step)) * root
        gap = every - wanted[:, None]
        cost = tl.sum(gap * gap, 0)
        best = tl.min((cost.to(tl.int32, bitcast=True) & -256) | code, 0) & 255
        tl.store(codes + row * COLUMNS + step, best.to(tl.uint8))
        chosen = tl.load(tables + offset + (best >> shift), mask=some, other=0.0)
        fall = own_level - chosen
        tl.store(falls + (row * WIDTHS + width) * COLUMNS + step, fall, mask=some)
        later = (column > step) & (column < COLUMNS)
        coupling = tl.load(hessians + step * COLUMNS + column, mask=later, other=0.0)
        pull += fall[:, None] * coupling[None, :]


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
    descend_kernel[(blocks * count,)](
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
        LEVELS=1 << (min_bits + widths - 1),
        COLUMNS=columns,
        PADDED_COLUMNS=triton.next_power_of_2(columns),
        num_warps=1,
    )
    return codes, falls


def _rows_side_by_side(tensor: Tensor) -> Tensor:
    """[E, N, W, S] whose rows follow each other through all blocks, at one stride."""
    regular = tensor.stride(3) == 1 and tensor.stride(0) == tensor.shape[1] * tensor.stride(1)
    return tensor if regular else tensor.contiguous()
