"""How the products of `products.cu` are launched: chosen from shapes alone. Needs no GPU.

Axes as in `products`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

STEP = 32  # columns
ROWS = 16  # of a block
TOKENS = 8  # of a tile
WARPS = 16  # of a block at most
NORM_STEPS = 16  # at most, of a warp that norms: it holds all of its x


class Arguments(ctypes.Structure):
    """`Arguments` of products.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "x", "weight", "norm", "bias", "add", "more", "share", "out", "rest", "normed",
            "results", "ids", "live",
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
        stages: Steps of 32 columns that a warp has in flight.
        turn: Steps whose x a warp holds at a time.
        blocks: Wanted on a multiprocessor; bounds the registers of a thread.
        tiles: Of eight tokens each, all that there are; one where a norm comes first.
    """

    warps: int
    stages: int
    turn: int
    blocks: int = 1
    tiles: int = 1

    def shared_bytes(self, cols: int, norm: bool) -> int:
        """Dynamic shared memory of a block: copies or sums, squares, the norm's weights."""
        squares = self.warps * self.tiles * TOKENS * 4
        size = max(self.warps * self.stages * 1024, squares * (ROWS + 4))
        return size + squares + cols * 2 if norm else size


def choose_plan(tokens: int, cols: int, norm: bool) -> Plan:
    """As measured on an H200; sums are in the same order for every number of tokens."""
    steps = cols // STEP
    if norm:
        warps = next(count for count in (4, 8, WARPS) if steps <= 8 * count or count == WARPS)
        own = -(-steps // warps)
        return Plan(warps, min(own, 4), own, blocks=3 if warps <= 8 else 1)
    own = -(-steps // WARPS)
    if tokens > TOKENS:
        return Plan(WARPS, min(own, 8), min(own, 2), tiles=2 if tokens <= 2 * TOKENS else 4)
    return Plan(WARPS, min(own, 11), min(own, 12), blocks=2 if own <= 4 else 1)


def constants_of(
    plan: Plan, shape: Sequence[int], dtype: torch.dtype, bias: bool, norm: bool
) -> dict[str, int]:
    """Macros of products.cu for a plain product."""
    rows, cols = shape
    return {
        "FLOAT16": int(dtype == torch.float16), "N": rows, "K": cols, "WARPS": plan.warps,
        "BLOCKS": plan.blocks, "STAGES": plan.stages, "TURN": plan.turn, "NT": plan.tiles,
        "NORM": int(norm), "BIAS": int(bias), "GATED": 0, "INNER": 0, "KIND": 0,
        "ADD": 0, "ROUTED": 0, "EXPERTS": 0,
    }  # fmt: skip
