"""Parts of blocks are, bit for bit, what packing the part's own codes gives."""

from __future__ import annotations

import pytest
import torch

from pw_kernels.bitplane import dequantize, pack_planes
from pw_kernels.slicing import BlockPart, cut_lut, cut_planes

BITS = 5


def parts_of(rows: int, cols: int, size: int) -> list[BlockPart]:
    """Gate and up rows of each rank, and columns of each rank."""
    half, run = rows // 2, rows // 2 // size
    wide = cols // size
    by_rows = [
        BlockPart(
            rows,
            cols,
            (range(r * run, (r + 1) * run), range(half + r * run, half + (r + 1) * run)),
            range(cols),
        )
        for r in range(size)
    ]
    by_cols = [
        BlockPart(rows, cols, (range(rows),), range(r * wide, (r + 1) * wide)) for r in range(size)
    ]
    return by_rows + by_cols


# Whole tiles; rows that end inside a tile; columns that begin inside one; neither.
@pytest.mark.parametrize(("rows", "cols"), [(256, 512), (80, 512), (256, 192), (48, 40)])
@pytest.mark.parametrize("first", [0, 2])
def test_a_part_is_packed_like_a_block_of_its_own(rows: int, cols: int, first: int) -> None:
    codes = torch.randint(0, 1 << BITS, (rows, cols), dtype=torch.uint8)
    planes = pack_planes(codes, BITS)
    for part in parts_of(rows, cols, 2):
        kept = torch.cat([codes[run.start : run.stop] for run in part.row_runs])
        kept = kept[:, part.col_run.start : part.col_run.stop]
        assert tuple(kept.shape) == part.shape
        assert torch.equal(cut_planes(planes[first:], first, part), pack_planes(kept, BITS)[first:])


def test_whole_tiles_are_copied_and_others_packed_again() -> None:
    assert all(part.whole_tiles for part in parts_of(256, 512, 2))
    assert [part.whole_tiles for part in parts_of(80, 192, 2)] == [False] * 4
    # The last run may end inside the block's last tile.
    assert BlockPart(70, 130, (range(64, 70),), range(128, 130)).whole_tiles


@pytest.mark.parametrize(("rows", "cols"), [(256, 512), (48, 40)])
def test_a_part_decodes_to_the_part_of_the_weights(rows: int, cols: int) -> None:
    codes = torch.randint(0, 1 << BITS, (rows, cols), dtype=torch.uint8)
    lut = torch.randn(rows, 1 << BITS)
    planes = pack_planes(codes, BITS)
    whole = dequantize(planes, lut, rows, cols)
    for part in parts_of(rows, cols, 2):
        expected = torch.cat([whole[run.start : run.stop] for run in part.row_runs])
        expected = expected[:, part.col_run.start : part.col_run.stop]
        table = cut_lut(lut, part)
        assert table.shape[0] % 32 == 0
        assert not table[part.shape[0] :].any()
        assert torch.equal(dequantize(cut_planes(planes, 0, part), table, *part.shape), expected)
