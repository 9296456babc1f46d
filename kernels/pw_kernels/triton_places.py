"""`places.Places` in Triton, without an index and without atomics: sums are in a fixed order.

Codes are nested, so columns sorted by code are sorted for every width: the weights of one place
follow each other.

Axes: R rows of all blocks, K columns, W widths, C levels of all widths' tables side by side.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 512  # that a program reads levels for


@triton.jit
def levels_kernel(
    tables,  # [R, C] float32
    codes,  # [R, K] uint8
    levels,  # [R, W, K] float32
    cols,
    MIN_BITS: tl.constexpr,
    WIDTHS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Some columns of a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < cols
    size: tl.constexpr = (1 << (MIN_BITS + WIDTHS)) - (1 << MIN_BITS)  # C
    code = tl.load(codes + row * cols + column, mask=inside, other=0).to(tl.int32)
    for width in tl.static_range(WIDTHS):
        place = (1 << (MIN_BITS + width)) - (1 << MIN_BITS) + (code >> (WIDTHS - 1 - width))
        level = tl.load(tables + row * size + place, mask=inside, other=0.0)
        tl.store(levels + (row * WIDTHS + width) * cols + column, level, mask=inside)


@triton.jit
def sums_kernel(
    values,  # [R, W, K] float32
    order,  # [R, K] int16 or int32, columns by ascending code
    starts,  # [R, LEVELS + 1] int32, where each code begins in it
    sums,  # [R, C] float32
    cols,
    MIN_BITS: tl.constexpr,
    WIDTHS: tl.constexpr,
    WIDTH: tl.constexpr,
    LEVELS: tl.constexpr,  # 2^max_bits
):
    """One row at one width."""
    row = tl.program_id(0).to(tl.int64)
    code = tl.arange(0, LEVELS)
    start = tl.load(starts + row * (LEVELS + 1) + code)
    end = tl.load(starts + row * (LEVELS + 1) + code + 1)
    values += (row * WIDTHS + WIDTH) * cols
    total = tl.zeros([LEVELS], dtype=tl.float32)
    for step in range(0, tl.max(end - start, 0)):
        some = start + step < end
        column = tl.load(order + row * cols + start + step, mask=some, other=0).to(tl.int32)
        total += tl.load(values + column, mask=some, other=0.0)
    own: tl.constexpr = 1 << (MIN_BITS + WIDTH)  # places of this width
    size: tl.constexpr = (1 << (MIN_BITS + WIDTHS)) - (1 << MIN_BITS)  # C
    place = row * size + own - (1 << MIN_BITS) + tl.arange(0, own)
    tl.store(sums + place, tl.sum(tl.reshape(total, [own, LEVELS // own]), 1))


class SortedPlaces:
    """See `places.Places`; arguments as of `places.IndexedPlaces`."""

    def __init__(self, codes: Tensor, min_bits: int, widths: int) -> None:
        self._codes = codes.contiguous()
        self._min_bits, self._widths = min_bits, widths
        most = 1 << (min_bits + widths - 1)
        ascending, order = torch.sort(self._codes.flatten(0, 1), dim=1)
        short = torch.int16 if codes.shape[2] <= torch.iinfo(torch.int16).max else torch.int32
        self._order = order.to(short)
        every = torch.arange(most, device=codes.device).to(codes.dtype)
        first = torch.searchsorted(ascending, every.expand(len(order), most).contiguous())
        end = torch.full_like(first[:, :1], codes.shape[2])
        self._starts = torch.cat([first, end], 1).int()
        self._most, self._places = most, 2 * most - (1 << min_bits)

    def levels(self, tables: Tensor) -> Tensor:
        """See `Places.levels`."""
        blocks, rows, cols = self._codes.shape
        levels = tables.new_empty((blocks, rows, self._widths, cols))
        levels_kernel[(blocks * rows, triton.cdiv(cols, _COLUMNS))](
            tables.contiguous(),
            self._codes,
            levels,
            cols,
            MIN_BITS=self._min_bits,
            WIDTHS=self._widths,
            COLUMNS=_COLUMNS,
        )
        return levels

    def sums(self, values: Tensor) -> Tensor:
        """See `Places.sums`."""
        blocks, rows, cols = self._codes.shape
        values = values.contiguous()
        sums = values.new_empty((blocks, rows, self._places))
        for width in range(self._widths):
            sums_kernel[(blocks * rows,)](
                values,
                self._order,
                self._starts,
                sums,
                cols,
                MIN_BITS=self._min_bits,
                WIDTHS=self._widths,
                WIDTH=width,
                LEVELS=self._most,
            )
        return sums
