"""How the attention of `joint_attention.cu` is launched: chosen from shapes alone. Needs no GPU."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

SIZES = (64, 128, 256, 512)  # of a head
MOST_GROUP = 8  # query heads of a key head: columns of an instruction of the matrix unit
_CLUSTERS = (8, 4, 2, 1)  # blocks
_PLACES = 132  # multiprocessors of an H200
_WITH_ROOM = 64  # of them, where clusters of more than two blocks find a place for each block
_WARPS = 8
_TILE = 16


class Arguments(ctypes.Structure):
    """`Arguments` of joint_attention.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "qkv", "cos", "sin", "norm", "k_pages", "v_pages", "tables", "query_start",
            "seq_lens", "out",
        )),
        *((name, ctypes.c_uint32) for name in (
            "k_page", "k_token", "k_head", "v_page", "v_token", "v_head", "qkv_row", "angle_row",
        )),
        *((name, ctypes.c_int) for name in ("table_row", "blocks", "tokens", "window")),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("epsilon", ctypes.c_float),
    )  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """Launch choices.

    Attributes:
        cluster: Blocks that share the keys of one query at one key head.
        units: Copies that a warp has room for.
        blocks: Wanted on a multiprocessor; bounds the registers of a thread.
        warps: Of a block.
    """

    cluster: int
    units: int
    blocks: int
    warps: int = _WARPS


def choose_plan(tokens: int, heads: int, kv_heads: int, size: int) -> Plan | None:
    """As measured on an H200; None where there are too many queries and key heads.

    Where a multiprocessor has room for one block, large clusters find places for a part of it only.
    """
    pairs = tokens * kv_heads
    if size not in SIZES or heads // kv_heads > MOST_GROUP or pairs > _PLACES:
        return None
    fill = next(n for n in _CLUSTERS if n * pairs <= _PLACES)
    if size <= 128:  # two blocks beside each other, where clusters are large or blocks many
        return Plan(2, units=4, blocks=1) if fill == 2 else Plan(max(fill, 2), units=3, blocks=2)
    alone = next(n for n in _CLUSTERS if n * pairs <= (_WITH_ROOM if n > 2 else _PLACES))
    if size == 512:
        return Plan(alone, units=5, blocks=1)
    if 2 * pairs > _PLACES:
        return None
    return Plan(alone, units=4, blocks=1) if alone == fill else Plan(fill, units=3, blocks=2)


def constants_of(
    plan: Plan, heads: int, kv_heads: int, size: int, page_tokens: int, dtype: torch.dtype
) -> dict[str, int]:
    """Macros of joint_attention.cu, without norm, shared values, window and softcap."""
    return {
        "FLOAT16": int(dtype == torch.float16), "HEADS": kv_heads, "GROUP": heads // kv_heads,
        "SIZE": size, "TOKENS": page_tokens, "CLUSTER": plan.cluster,
        "WARPS": plan.warps, "BLOCKS": plan.blocks, "UNITS": plan.units,
    }  # fmt: skip


def shared_bytes(constants: dict[str, int]) -> int:
    """Dynamic shared memory of a block."""
    names = ("WARPS", "UNITS", "SIZE", "GROUP", "CLUSTER")
    warps, units, size, group, cluster = (constants[name] for name in names)
    ring = warps * units * _TILE * 2 * min(size, 128)
    sums = 6 * group * size if cluster > 1 else 0
    return ring + 2 * (group + 2) * size + sums


def threads_of(plan: Plan) -> int:
    """Threads of a block."""
    return 32 * plan.warps
