"""How the attention of `attention.cu` is launched: chosen from shapes alone. Needs no GPU."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

SIZES = (64, 128, 512)  # of a head; at 256 the Triton form is faster
MOST_GROUP = 8  # query heads of an item: columns of an instruction of the matrix unit
MOST_TOKENS = 512  # whose places in the list of items have room in shared memory
_MOST_SHARE = 2
_UNIT_ROWS, _UNIT_COLS = 16, 128
_SHARED_BYTES, _RESERVED_BYTES = 228 << 10, 1 << 10  # of a multiprocessor (Hopper), of each block
_FEWER_TOKENS, _FEW_TOKENS = 2, 8


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
        blocks: Of a multiprocessor at most.
        part: Keys of a part.
    """

    warps: int
    units: int
    blocks: int
    part: int


def choose_plan(tokens: int, group: int, size: int) -> Plan:
    """The plan for T queries with so many query heads of a key head."""
    units = 3 if size == 128 else 4
    if group == 1 and size <= 128 and tokens <= _FEW_TOKENS:
        return Plan(warps=8, units=units, blocks=2, part=256 if tokens <= _FEWER_TOKENS else 512)
    return Plan(warps=4, units=units, blocks=2 if size == 512 else 4, part=512)


def share_of(group: int, size: int) -> int:
    """Heads of items that have a key head in common, whose keys are then read as often.

    An item has up to eight query heads, and its queries are one copy.
    """
    most = min(MOST_GROUP, _UNIT_ROWS * _columns(size) // size)
    return next(n for n in range(1, group + 1) if group % n == 0 and group // n <= most)


def takes(heads: int, kv_heads: int, size: int) -> bool:
    """Whether there is a kernel for such heads."""
    return size in SIZES and share_of(heads // kv_heads, size) <= _MOST_SHARE


def parts_of(context: int, plan: Plan) -> int:
    """Parts of the longest context there may be."""
    return -(-context // plan.part)


def workspace_bytes(tokens: int, heads: int, kv_heads: int, size: int, context: int) -> int:
    """What the parts of a batch take."""
    plan = choose_plan(tokens, heads // kv_heads, size)
    return 4 * tokens * heads * parts_of(context, plan) * (size + 2)


def most_workspace_bytes(tokens: int, heads: int, kv_heads: int, size: int, context: int) -> int:
    """The same for the worst batch of up to so many."""
    tokens = min(tokens, MOST_TOKENS)
    counts = {min(tokens, _FEWER_TOKENS), tokens}
    return max(workspace_bytes(n, heads, kv_heads, size, context) for n in counts)


def constants_of(
    plan: Plan, heads: int, kv_heads: int, size: int, page_tokens: int, dtype: torch.dtype
) -> dict[str, int]:
    """Macros of attention.cu, without window, softcap and sinks."""
    share = share_of(heads // kv_heads, size)
    constants = {
        "FLOAT16": int(dtype == torch.float16), "SHARE": share, "HEADS": kv_heads * share,
        "GROUP": heads // kv_heads // share, "SIZE": size, "TOKENS": page_tokens,
        "PART": plan.part, "WARPS": plan.warps, "UNITS": plan.units,
    }  # fmt: skip
    return constants | {"BLOCKS": min(plan.blocks, blocks_of(constants, 64))}


def blocks_of(constants: dict[str, int], tokens: int) -> int:
    """Blocks of a multiprocessor that shared memory has room for."""
    return _SHARED_BYTES // (shared_bytes(constants, tokens) + _RESERVED_BYTES)


def shared_bytes(constants: dict[str, int], tokens: int) -> int:
    """Dynamic shared memory of a block."""
    warps, group, size = (constants[name] for name in ("WARPS", "GROUP", "SIZE"))
    return ring_bytes(constants) + 4 * (warps * group * (size + 6) + 3 * tokens + 2)


def ring_bytes(constants: dict[str, int]) -> int:
    """Of it, what copies have; the lengths of all sequences lie there before."""
    return constants["WARPS"] * constants["UNITS"] * _UNIT_ROWS * 2 * _columns(constants["SIZE"])


def _columns(size: int) -> int:
    return min(size, _UNIT_COLS)
