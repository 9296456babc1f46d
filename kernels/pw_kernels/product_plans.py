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
WARPS = 16  # of a block at most
NORM_STEPS = 16  # at most, of a warp that norms: it holds all of its x
_LOAD_BYTES = 512  # of a warp, at once
_ROOM = 176 << 10  # bytes of shared memory for weights on their way, of a multiprocessor


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
        tiles: Of 16 rows of the weight, of a block.
        stages: Steps of 32 columns that a warp has in flight.
        turn: Steps whose x a warp holds at a time.
        blocks: Wanted on a multiprocessor; bounds the registers of a thread.
        token_tiles: Of 8 tokens.
    """

    warps: int
    split: int = 1
    tiles: int = 1
    stages: int = 8
    turn: int = 8
    blocks: int = 1
    token_tiles: int = 1

    def steps(self, cols: int) -> int:
        """Of a warp."""
        of_block = -(-(cols // STEP) // self.split)
        return -(-of_block // self.warps)

    def shared_bytes(self, cols: int, norm: bool) -> int:
        """Dynamic shared memory of a block: copies or sums, squares, the norm's weights."""
        tokens, rows = 8 * self.token_tiles, ROWS * self.tiles
        ring = self.warps * self.stages * 2 * self.tiles * _LOAD_BYTES
        size = max(ring, self.warps * tokens * (rows + 4) * 4)
        if not norm:
            return size
        return size + -(-self.warps * tokens * 4 // 128) * 128 + cols * 2


def choose_plan(tokens: int, cols: int, norm: bool) -> Plan:
    """A block's share of the columns is all in flight where that fits."""
    steps = cols // STEP
    warps = next((count for count in (4, 8) if steps <= 8 * count), WARPS)
    token_tiles = -(-tokens // 8)
    plan = Plan(warps, token_tiles=token_tiles)
    own = plan.steps(cols)
    if token_tiles == 1:
        stages = min(own, _ROOM // (warps * 2 * _LOAD_BYTES))
        blocks = max(1, min(3, (220 << 10) // (warps * stages * 1024 + (6 << 10)), 24 // warps))
        return replace(plan, stages=stages, turn=own if norm else min(own, 12), blocks=blocks)
    tiles = 2 if token_tiles == 2 else 4
    stages = min(own, _ROOM // (warps * 2 * tiles * _LOAD_BYTES))
    return replace(plan, tiles=tiles, stages=stages, turn=min(own, 4 if token_tiles == 2 else 2))


def constants_of(
    plan: Plan, shape: Sequence[int], dtype: torch.dtype, bias: bool, norm: bool
) -> dict[str, int]:
    """Macros of products.cu for a plain product."""
    rows, cols = shape
    return {
        "FLOAT16": int(dtype == torch.float16), "N": rows, "K": cols, "NT": plan.token_tiles,
        "WARPS": plan.warps, "BLOCKS": plan.blocks, "SPLIT": plan.split, "TILES": plan.tiles,
        "STAGES": plan.stages, "TURN": plan.turn, "NORM": int(norm), "BIAS": int(bias),
        "GATED": 0, "INNER": 0, "KIND": 0, "ADD": 0,
    }  # fmt: skip
