"""How the products of `products.cu` are launched: chosen from shapes alone. Needs no GPU.

Axes as in `products`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

STEP = 32  # columns
ROWS = 16  # of a block
TOKENS = 8  # of a tile
WARPS = 16  # of a block at most
FEW_WARPS = 4  # of a small one, for a tile of tokens beside other launches
BESIDE_TOKENS = range(17, 33)  # beside other launches these are for blocks of half as many
_PLACES = 132  # multiprocessors of an H200
_ROOM = 227 << 10  # bytes of shared memory that a block of it may have
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
        height: Tiles of 16 rows that a block takes.
    """

    warps: int
    stages: int
    turn: int
    blocks: int = 1
    tiles: int = 1
    height: int = 1

    def shared_bytes(self, cols: int, norm: bool) -> int:
        """Dynamic shared memory of a block: copies or sums, squares, the norm's weights."""
        squares = self.warps * self.tiles * TOKENS * 4
        copies = self.warps * self.stages * self.height * 1024
        size = max(copies, squares * (self.height * ROWS + 4))
        return size + squares + cols * 2 if norm else size

    def grid(self, rows: int, inner: int) -> int:
        """Blocks for N rows, of which 2I are gated."""
        return -(-_row_tiles(rows, inner) // self.height)


def _row_tiles(rows: int, inner: int) -> int:
    """Tiles of 16 rows; those of a gate are half of it."""
    return inner // 8 + -(-(rows - 2 * inner) // ROWS)


def choose_plan(
    tokens: int,
    shape: Sequence[int],
    norm: bool,
    inner: int = 0,
    room: int = _ROOM,
    beside: bool = False,
) -> Plan:
    """As measured on an H200; sums are in the same order for every number of tokens, but `beside`.

    Args:
        tokens: T.
        shape: N, K.
        norm: A norm comes first.
        inner: I, of the rows that are gated.
        room: Bytes of shared memory that a block may have.
        beside: Other launches run meanwhile, so that only small blocks find a place. Those of a
            tile of tokens and no norm have four warps, those of BESIDE_TOKENS half as many as
            others, and with them sums in another order.
    """
    rows, cols = shape
    steps = cols // STEP
    if norm:
        warps = next(count for count in (4, 8, WARPS) if steps <= 8 * count or count == WARPS)
        own = -(-steps // warps)
        plan = Plan(warps, min(own, 4), own, blocks=3 if warps <= 8 else 1)
        tiles = _row_tiles(rows, inner)
        if beside and warps <= 8:
            pair = replace(plan, height=2)
            return pair if plan.blocks * pair.shared_bytes(cols, norm) <= room else plan
        if warps <= 8:
            full = 0.95 if tokens <= 4 else 1.0  # of a round, which leaves attention room to begin
            if tiles > 3 * full * _PLACES:
                height = 3
            else:
                height = 2 if tiles > 2 * _PLACES and tokens > 4 else 1
        else:
            height = -(-tiles // _PLACES) if tiles <= 3 * _PLACES else 1
        blocks = 2 if warps <= 8 else 1
        tall = replace(plan, blocks=blocks, height=height)  # in one round; fewer read the tokens
        return tall if height > 1 and blocks * tall.shared_bytes(cols, norm) <= room else plan
    if beside and tokens <= TOKENS:
        own = -(-steps // FEW_WARPS)
        return Plan(FEW_WARPS, min(own, 8), min(own, 8), blocks=5)
    own = -(-steps // WARPS)
    if tokens in BESIDE_TOKENS and beside:
        return Plan(WARPS // 2, 4, 4, tiles=2 if tokens <= 2 * TOKENS else 4)
    if tokens > TOKENS:
        return Plan(WARPS, min(own, 8), min(own, 4), tiles=2 if tokens <= 2 * TOKENS else 4)
    plan = Plan(WARPS, min(own, 11), min(own, 12), blocks=2 if own <= 4 else 1)
    tall = Plan(WARPS, min(own, 6), min(own, 6), height=2)
    rounds = [-(-blocks // _PLACES) for blocks in (plan.grid(rows, inner), tall.grid(rows, inner))]
    pays = own > 4 and 1 < rounds[0] >= 2 * rounds[1]  # no multiprocessor has less to do
    return tall if pays and tall.shared_bytes(cols, norm) <= room else plan


def constants_of(
    plan: Plan, shape: Sequence[int], dtype: torch.dtype, bias: bool, norm: bool
) -> dict[str, int]:
    """Macros of products.cu for a plain product."""
    rows, cols = shape
    return {
        "FLOAT16": int(dtype == torch.float16), "N": rows, "K": cols, "WARPS": plan.warps,
        "BLOCKS": plan.blocks, "STAGES": plan.stages, "TURN": plan.turn, "NT": plan.tiles,
        "MT": plan.height,
        "NORM": int(norm), "BIAS": int(bias), "GATED": 0, "INNER": 0, "KIND": 0,
        "ADD": 0, "ROUTED": 0, "EXPERTS": 0,
    }  # fmt: skip
