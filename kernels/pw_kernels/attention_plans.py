"""How the attention of `attention.cu` is launched: chosen from shapes alone. Needs no GPU."""

from __future__ import annotations

import ctypes

import torch

PART_KEYS = 512
PROGRAMS = 1024  # of a launch at least, where there are so many parts


class Arguments(ctypes.Structure):
    """`Arguments` of attention.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "q", "k_pages", "v_pages", "tables", "query_start", "seq_lens", "sinks", "out",
            "partial", "extremes", "arrived",
        )),
        *((name, ctypes.c_uint64) for name in (
            "k_page", "k_token", "k_head", "v_page", "v_token", "v_head",
        )),
        *((name, ctypes.c_int) for name in (
            "q_token", "q_head", "table_row", "sequences", "parts", "programs", "window",
        )),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )  # fmt: skip


def programs_of(tokens: int, kv_heads: int, context: int) -> tuple[int, int]:
    """Parts of the longest context there may be, and blocks that share those of a query."""
    parts = -(-context // PART_KEYS)
    return parts, min(parts, -(-PROGRAMS // (tokens * kv_heads)))


def constants_of(
    heads: int, kv_heads: int, size: int, page_tokens: int, dtype: torch.dtype
) -> dict[str, int]:
    """Macros of attention.cu, without window, softcap and sinks."""
    group = heads // kv_heads
    return {
        "FLOAT16": int(dtype == torch.float16), "HEADS": kv_heads, "GROUP": group, "SIZE": size,
        "TOKENS": page_tokens, "PART": PART_KEYS, "WARPS": 8,
        "AHEAD": 4 if group * size <= 256 else 2,
    }  # fmt: skip


def shared_bytes(constants: dict[str, int]) -> int:
    """Dynamic shared memory of a block."""
    size = constants["SIZE"]
    units = constants["WARPS"] * 32 // min(32, size // 8)
    pages = -(-constants["PART"] // constants["TOKENS"]) + 1
    return 4 * (units * constants["GROUP"] * (size + 2) + pages + 1)
