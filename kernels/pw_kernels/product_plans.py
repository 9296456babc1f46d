"""How the products of `products.cu` are launched: chosen from shapes alone. Needs no GPU.

Axes as in `products`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

STEP = 32  # columns
ROWS = 16  # of a tile
_WARPS = 16  # of a block at most
_HELD = 16  # steps times tiles of 8 tokens whose x a warp can hold
_LOAD_BYTES = 1024  # of a warp in a step
_RING = (11, 6)  # steps in flight of each of 8 and of 16 warps: leaves room for the next launch's


class Arguments(ctypes.Structure):
    """`Arguments` of products.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "x", "weight", "norm", "bias", "add", "more", "share", "out", "rest", "normed",
            "parts", "arrived",
        )),
        *((name, ctypes.c_int) for name in (
            "tokens", "x_row", "add_row", "more_row", "share_row",
        )),
        ("epsilon", ctypes.c_float),
    )  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """Launch choices, from shapes alone.

    Attributes:
        warps: Of a block; they share its columns.
        split: Blocks that share the columns.
        stages: Steps of 32 columns that a warp has in flight.
        blocks: Bounds the registers of a thread: so many blocks could be on a multiprocessor.
        token_tiles: Of 8 tokens.
        resident: Blocks on a multiprocessor, all of which there are.
    """

    warps: int
    split: int = 1
    stages: int = 8
    blocks: int = 1
    token_tiles: int = 1
    resident: int = 1

    def steps(self, cols: int) -> int:
        """Of a warp for each tile."""
        of_block = -(-(cols // STEP) // self.split)
        return -(-of_block // self.warps)

    def shared_bytes(self, cols: int, norm: bool) -> int:
        """Dynamic shared memory of a block: copies, two tiles' sums, a word; for a norm."""
        squares = self.warps * 8 * self.token_tiles * 4
        sums = squares * (ROWS + 4)
        size = self.warps * self.stages * _LOAD_BYTES + 2 * sums + 128
        return size + -(-squares // 128) * 128 + 2 * cols if norm else size

    def grid(self, tiles: int, processors: int) -> tuple[int, int]:
        """Blocks."""
        return min(tiles, max(1, processors * self.resident // self.split)), self.split


def choose_plan(tokens: int, cols: int) -> Plan:
    """The same for any number of tokens up to 8; half of a multiprocessor is left to others."""
    steps, token_tiles = cols // STEP, -(-tokens // 8)
    warps = 8 if token_tiles == 1 and steps <= 64 else _WARPS
    most = max(1, _HELD // token_tiles)
    plan = Plan(warps, split=-(-steps // (warps * most)), token_tiles=token_tiles)
    stages = _RING[warps == _WARPS]
    return replace(plan, stages=stages, blocks=3 if warps == 8 else 1)


def constants_of(
    plan: Plan, shape: Sequence[int], dtype: torch.dtype, bias: bool, norm: bool
) -> dict[str, int]:
    """Macros of products.cu for a plain product."""
    rows, cols = shape
    return {
        "FLOAT16": int(dtype == torch.float16), "N": rows, "K": cols, "NT": plan.token_tiles,
        "WARPS": plan.warps, "BLOCKS": plan.blocks, "SPLIT": plan.split,
        "STAGES": plan.stages, "NORM": int(norm), "BIAS": int(bias),
        "GATED": 0, "INNER": 0, "KIND": 0, "ADD": 0,
    }  # fmt: skip
