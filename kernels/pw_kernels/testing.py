"""Random blocks in a scattered arena, for tests and benchmarks of anything that reads pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pw_kernels.bitplane import bit_reverse_lut, pack_planes, padded_rows
from pw_kernels.pages import NO_PAGE, WeightPages

BASE_BITS = 5  # tables up to this width share one region, as in the runtime's base tree
_ALIGN = 512


@dataclass
class ScatteredArena:
    """An arena of random bytes whose pages are handed out in random order.

    Args:
        pages: P.
        page_bytes: Power of two, 4096 or more.
    """

    pages: int
    page_bytes: int
    data: Tensor = field(init=False)  # [P, page_bytes] uint8

    def __post_init__(self) -> None:
        self.data = torch.randint(0, 256, (self.pages, self.page_bytes), dtype=torch.uint8)
        self._free: list[int] = torch.randperm(self.pages).tolist()

    def store(self, block: Tensor) -> list[int]:
        """Copy a tensor's bytes into fresh pages; returns their ids."""
        flat = block.contiguous().view(torch.uint8).flatten()
        ids = []
        for start in range(0, flat.numel(), self.page_bytes):
            chunk = flat[start : start + self.page_bytes]
            page = self._free.pop()
            self.data[page, : chunk.numel()] = chunk
            ids.append(page)
        return ids


def store_blocks(
    arena: ScatteredArena, codes: Tensor, luts: dict[int, Tensor], bits: Sequence[int]
) -> WeightPages:
    """Place the blocks of one (layer, module), each with just the planes of its own width.

    Args:
        arena: Where to.
        codes: [E, N, K] uint8 codes of the widest width in `luts`.
        luts: Natural-order tables {b: [E, N, 2^b]} in a 2-byte dtype.
        bits: Committed width of each expert, each a key of `luts`.
    """
    experts, rows, cols = codes.shape
    max_bits = max(luts)
    planes = pack_planes(codes, max_bits)
    plane_ids, table_ids, offsets = [], [], []
    for expert in range(experts):
        width = bits[expert]
        ids = [arena.store(planes[expert, p]) for p in range(width)]
        plane_ids.append(ids + [[NO_PAGE] * len(ids[0])] * (max_bits - width))
        region, offset = _table_region(luts, expert, width, padded_rows(rows))
        table_ids.append(arena.store(region))
        offsets.append(offset)
    longest = max(map(len, table_ids))
    padded = [ids + [NO_PAGE] * (longest - len(ids)) for ids in table_ids]
    return WeightPages(
        rows,
        cols,
        torch.tensor(bits, dtype=torch.int32),
        torch.tensor(plane_ids, dtype=torch.int32),
        torch.tensor(padded, dtype=torch.int32),
        torch.tensor(offsets, dtype=torch.int32),
    )


def random_blocks(
    arena: ScatteredArena,
    rows: int,
    cols: int,
    bits: Sequence[int],
    dtype: torch.dtype = torch.bfloat16,
    max_bits: int = 8,
) -> WeightPages:
    """Place random blocks of one (layer, module), weights of about unit gain; E = len(bits)."""
    codes = torch.randint(0, 1 << max_bits, (len(bits), rows, cols), dtype=torch.uint8)
    luts = {
        b: (torch.randn(len(bits), rows, 1 << b).sort(-1).values * cols**-0.5).to(dtype)
        for b in range(min(bits), max_bits + 1)
    }
    return store_blocks(arena, codes, luts, bits)


def _table_region(
    luts: dict[int, Tensor], expert: int, width: int, rows: int
) -> tuple[Tensor, int]:
    """Region bytes that hold the table of `width`, and its byte offset there."""
    shared = [b for b in sorted(luts) if b <= BASE_BITS] if width <= BASE_BITS else [width]
    parts, offset, size = [], 0, 0
    for b in shared:
        lut = bit_reverse_lut(luts[b][expert])
        table = torch.zeros(rows, 1 << b, dtype=lut.dtype)
        table[: lut.shape[0]] = lut
        raw = table.view(torch.uint8).flatten()
        if b == width:
            offset = size
        padded = -(-raw.numel() // _ALIGN) * _ALIGN
        parts.append(torch.nn.functional.pad(raw, (0, padded - raw.numel())))
        size += padded
    return torch.cat(parts), offset
