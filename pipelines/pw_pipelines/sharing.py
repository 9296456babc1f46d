"""Tables that rows share: the start of their fit, and what ties rows together.

A table costs 16 * 2^b / K bits a weight, dear where rows are short: at 256 columns a table of five
bits costs as much as two planes. Where `table_bytes` is given, rows so many bytes apart in a LUT
have one table: row n that of row n mod (table_bytes / bytes of a row's table). Each row keeps its
own codes. What a LUT holds on disk is whole and says the same again and again; a page of it is held
once in memory (`pw.memory.layout`).

Axes: E blocks, N rows, K columns, C levels of all widths' tables side by side.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pw.blocks import MODULES, ExpertGeometry
from pw_kernels.bitplane import TILE_ROWS, lut_bytes
from pw_kernels.places import Places
from pw_pipelines.codebook import Codebook, fit_codebook

TABLE_BYTES = 4096  # a page of the smallest size
_DEAR = 0.5  # bits a weight that tables of four bits may cost before rows share them
WIDEST = 6  # bits: codes start from a fit of as many rows as share this table, more mean too little


def choose_table_bytes(geometry: ExpertGeometry, max_bits: int) -> int | None:
    """`TABLE_BYTES` where tables are dear and rows can share them, else None."""
    shapes = [geometry.shape(module) for module in MODULES]
    cost = 8 * sum(lut_bytes(s.rows, 4) for s in shapes) / sum(s.weights for s in shapes)
    even = [TILE_ROWS, *(TABLE_BYTES // (2 << bits) for bits in range(2, max_bits + 1))]
    fits = all(s.rows % min(s.rows, count) == 0 for s in shapes for count in even)
    return TABLE_BYTES if cost > _DEAR and fits else None


def period(rows: int, bits: int, table_bytes: int) -> int:
    """Number of rows after which tables of a width say the same again."""
    return min(rows, table_bytes // (2 << bits))


def tie(values: Tensor, widths: Sequence[int], table_bytes: int, *, mean: bool = False) -> Tensor:
    """[E, N, C]: of each level the sum, or mean, over the rows that share it, at all of them."""
    blocks, rows, _ = values.shape
    parts = []
    for bits, part in zip(widths, torch.split(values, [1 << b for b in widths], 2), strict=True):
        apart = period(rows, bits, table_bytes)
        grid = part.view(blocks, rows // apart, apart, -1)
        one = grid.mean(1, keepdim=True) if mean else grid.sum(1, keepdim=True)
        parts.append(one.expand(grid.shape).reshape(part.shape))
    return torch.cat(parts, 2)


class TiedPlaces:
    """Places in tables that rows share (see `pw_kernels.places.Places`)."""

    def __init__(self, places: Places, widths: Sequence[int], table_bytes: int) -> None:
        self._places, self._widths, self._table_bytes = places, widths, table_bytes

    def levels(self, tables: Tensor) -> Tensor:
        """[E, N, C] -> [E, N, W, K]."""
        return self._places.levels(tables)

    def sums(self, values: Tensor) -> Tensor:
        """[E, N, W, K] -> [E, N, C], over the rows that share a table."""
        return tie(self._places.sums(values), self._widths, self._table_bytes)


def fit_shared(
    weights: Tensor,  # [E, N, K]
    moments: Tensor,  # [E, K]
    widths: Sequence[int],
    lut_dtype: torch.dtype,
    table_bytes: int,
) -> Codebook:
    """The k-means from which a refit with shared tables starts, of rows [E * N, K].

    Rows that share a table of `WIDEST` bits are one long row to it, so that their codes mean the
    same; of narrower tables fewer rows share, which the refit sees to.
    """
    blocks, rows, cols = weights.shape
    apart = period(rows, min(WIDEST, widths[-1]), table_bytes)
    times = rows // apart
    long = weights.view(blocks, times, apart, cols).transpose(1, 2).reshape(-1, times * cols)
    counts = moments.repeat(1, times).repeat_interleave(apart, 0)
    book = fit_codebook(long, counts, widths[0], widths[-1], lut_dtype)
    codes = book.codes.view(blocks, apart, times, cols).transpose(1, 2)

    def spread(table: Tensor) -> Tensor:
        """A table of every row from one of every long row."""
        own = table.view(blocks, 1, apart, -1).expand(-1, times, -1, -1)
        return own.reshape(blocks * rows, -1)

    return Codebook(
        codes=codes.reshape(-1, cols).contiguous(),
        luts={b: spread(table) for b, table in book.luts.items()},
        centroids={b: spread(table) for b, table in book.centroids.items()},
    )
