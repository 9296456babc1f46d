"""How the attention of `attention.cu` is launched: chosen from shapes alone. Needs no GPU."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

SIZES = (64, 128, 256)  # of a head; at 512 the Triton form is faster
MOST_GROUP = 8  # query heads of an item: columns of an instruction of the matrix unit
MOST_TOKENS = 512  # whose places in the list of items have room in shared memory
_MOST_SHARE = 2
_UNIT_ROWS, _UNIT_COLS = 16, 128
_ROOM = 227 << 10  # bytes of shared memory that a block of an H200 may have
_RINGS = ((8, 4), (8, 3), (4, 4), (4, 3))  # warps and units; the first as measured on an H200
_PLACES = 132  # multiprocessors of an H200
_PART = 1024  # keys
_SHORTEST = 128  # keys of a part where a query has several only for the sake of places


class Arguments(ctypes.Structure):
    """`Arguments` of attention.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "q", "k_pages", "v_pages", "tables", "query_start", "seq_lens", "sinks", "out",
            "partial", "extremes", "arrived",
        )),
        *((name, ctypes.c_uint32) for name in (
            "k_page", "k_token", "k_head", "v_page", "v_token", "v_head", "q_token", "q_head",
        )),
        *((name, ctypes.c_int) for name in (
            "table_row", "tokens", "sequences", "parts", "window",
        )),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """Launch choices.

    Attributes:
        warps: Of a block.
        units: Copies that a warp has room for.
        part: Keys of a part, about.
        least: Parts of a query, as far as they have `shortest` keys each, about.
        shortest: See `least`.
    """

    warps: int
    units: int
    part: int = _PART
    least: int = 1
    shortest: int = _SHORTEST

    def parts_of(self, keys: int) -> int:
        """Parts of so many keys at most."""
        few = min(self.least, (keys + self.shortest // 2) // self.shortest)
        return max(1, (keys + self.part // 2) // self.part, few)


def choose_plan(tokens: int, heads: int, kv_heads: int, size: int, room: int = _ROOM) -> Plan:
    """Parts for all places, where there are few queries; a block that has room.

    Args:
        tokens: T; only `least` depends on it.
        heads: Hq.
        kv_heads: Hkv.
        size: D.
        room: Bytes of shared memory that a block may have.
    """
    least = max(1, _PLACES // (tokens * kv_heads * share_of(heads // kv_heads)))
    for warps, units in _RINGS:
        plan = Plan(warps, units, least=least)
        constants = constants_of(plan, heads, kv_heads, size, 1, torch.bfloat16)
        if shared_bytes(constants, MOST_TOKENS) <= room:
            break
    return plan


def share_of(group: int) -> int:
    """Heads of items that have a key head in common, whose keys are then read as often."""
    return next(n for n in range(1, group + 1) if group % n == 0 and group // n <= MOST_GROUP)


def takes(heads: int, kv_heads: int, size: int) -> bool:
    """Whether there is a kernel for such heads."""
    return size in SIZES and share_of(heads // kv_heads) <= _MOST_SHARE


def workspace_bytes(tokens: int, heads: int, kv_heads: int, size: int, context: int) -> int:
    """What the parts of a batch take."""
    parts = choose_plan(tokens, heads, kv_heads, size).parts_of(context)
    return 4 * tokens * heads * parts * (size + 2)


def most_workspace_bytes(tokens: int, heads: int, kv_heads: int, size: int, context: int) -> int:
    """The same for the worst batch of up to so many."""
    tokens = min(tokens, MOST_TOKENS)
    counts = (*range(1, min(tokens, _PLACES) + 1), tokens)
    return max(workspace_bytes(n, heads, kv_heads, size, context) for n in counts)


def constants_of(
    plan: Plan, heads: int, kv_heads: int, size: int, page_tokens: int, dtype: torch.dtype
) -> dict[str, int]:
    """Macros of attention.cu, without window, softcap and sinks."""
    share = share_of(heads // kv_heads)
    return {
        "FLOAT16": int(dtype == torch.float16), "SHARE": share, "HEADS": kv_heads * share,
        "GROUP": heads // kv_heads // share, "SIZE": size, "TOKENS": page_tokens,
        "PART": plan.part, "LEAST": plan.least, "SHORTEST": plan.shortest, "WARPS": plan.warps,
        "UNITS": plan.units,
    }  # fmt: skip


def shared_bytes(constants: dict[str, int], tokens: int) -> int:
    """Dynamic shared memory of a block."""
    warps, group, size = (constants[name] for name in ("WARPS", "GROUP", "SIZE"))
    return ring_bytes(constants) + 4 * (warps * group * (size + 6) + 4 * tokens + 6)


def threads_of(constants: dict[str, int]) -> int:
    """Threads of a block: one more warp than multiply."""
    return 32 * (constants["WARPS"] + 1)


def ring_bytes(constants: dict[str, int]) -> int:
    """Of it, what copies have; the lengths of all sequences lie there before."""
    return constants["WARPS"] * constants["UNITS"] * _UNIT_ROWS * 2 * _columns(constants["SIZE"])


def _columns(size: int) -> int:
    return min(size, _UNIT_COLS)
