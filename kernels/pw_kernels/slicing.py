"""Parts of a block: some of its rows and a run of its columns, packed like a block of their own.

For models that several devices share: each keeps a part of every block, and its planes and tables
are those that packing the part's own codes would give. Where a part begins and ends at tiles, whole
tiles are copied; elsewhere the codes are taken out and packed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pw_kernels.bitplane import (
    TILE_COLS,
    TILE_ROWS,
    TILE_WORDS,
    pack_planes,
    padded_cols,
    padded_rows,
    rotate_left,
    unpack_planes,
)


@dataclass(frozen=True)
class BlockPart:
    """What is kept of a block of [N, K] weights."""

    rows: int  # N of the whole block
    cols: int  # K of the whole block
    row_runs: tuple[range, ...]  # rows kept, in this order
    col_run: range  # columns kept

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the part."""
        return sum(map(len, self.row_runs)), len(self.col_run)

    @property
    def whole_tiles(self) -> bool:
        """Whether the part is made of whole tiles of the block; the last may be its padded ones."""
        *inner, last = self.row_runs
        return (
            all(_aligned(run, TILE_ROWS) for run in inner)
            and _aligned(last, TILE_ROWS, self.rows)
            and _aligned(self.col_run, TILE_COLS, self.cols)
        )


def cut_planes(planes: Tensor, first: int, part: BlockPart) -> Tensor:
    """Planes of a part of a block.

    Args:
        planes: [count, tiles, 128] int32, neighbouring planes of the whole block.
        first: Number of the first of them, 0 = most significant.
        part: What to keep.

    Returns:
        [count, tiles of the part, 128] int32. Codes of padding are 0, or what they were.
    """
    count = planes.shape[0]
    if part.whole_tiles:
        row_tiles = padded_rows(part.rows) // TILE_ROWS
        grid = planes.view(count, row_tiles, padded_cols(part.cols) // TILE_COLS, TILE_WORDS)
        rows = _tiles_of(part.row_runs, TILE_ROWS)
        cols = _tiles_of((part.col_run,), TILE_COLS)
        kept = grid[:, rows][:, :, cols]
        return kept.reshape(count, len(rows) * len(cols), TILE_WORDS)
    # Plane p is rotated by p: taken back by `first`, they are the planes of a code of their own.
    codes = unpack_planes(rotate_left(planes, -first), part.rows, part.cols)
    run = part.col_run
    codes = codes[torch.cat([torch.arange(r.start, r.stop) for r in part.row_runs])]
    return rotate_left(pack_planes(codes[:, run.start : run.stop].contiguous(), count), first)


def cut_lut(lut: Tensor, part: BlockPart) -> Tensor:
    """Table of a part of a block: [N of the part, padded, 2^b], zero in rows of padding.

    Args:
        lut: [N or more, 2^b] of the whole block.
        part: What to keep.
    """
    kept = torch.cat([lut[run.start : run.stop] for run in part.row_runs])
    padding = kept.new_zeros(padded_rows(len(kept)) - len(kept), lut.shape[1])
    return torch.cat((kept, padding))


def _aligned(run: range, tile: int, end: int | None = None) -> bool:
    return run.start % tile == 0 and (run.stop % tile == 0 or run.stop == end)


def _tiles_of(runs: Sequence[range], tile: int) -> list[int]:
    return [number for run in runs for number in range(run.start // tile, -(-run.stop // tile))]
