"""How much of its queries and keys a program of `triton_attention` takes at a time."""

from __future__ import annotations

from functools import cache

import torch
import triton

SMALLEST_DOT = 16


def tile_shape(
    tokens: int, sequences: int, group: int, size: int, number_bytes: int, device: torch.device
) -> dict[str, int]:
    """Tile sizes: few rows for decode, many for prompts as far as the device has room for them.

    Args:
        tokens: T.
        sequences: B.
        group: Query heads of a key head.
        size: Of a head: of keys or values, whichever is more.
        number_bytes: Of the numbers that are multiplied.
        device: That it runs on.
    """
    padded = triton.next_power_of_2(group)
    if tokens <= sequences:
        rows = max(SMALLEST_DOT, padded)
        tiles = [(rows, 32, 8, 2) if size > 256 else (rows, 64, 4, 2 if size > 128 else 3)]
    elif size > 256:
        tiles = [(64, 32, 8, 2), (32, 32, 8, 2), (32, 16, 8, 2), (16, 16, 8, 2)]
    elif size > 128:
        tiles = [(128, 32, 8, 5), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2), (32, 16, 4, 2)]
    else:
        tiles = [(128, 64, 8, 5), (64, 64, 4, 3)]
    room, row_bytes = _shared_bytes(device), number_bytes * triton.next_power_of_2(size)
    fit = [tile for tile in tiles if _tile_bytes(*tile, row_bytes) <= room]
    rows, keys, warps, stages = fit[0] if fit else tiles[-1]
    rows = max(rows, padded)
    return {
        "PADDED_GROUP": padded, "ROWS": rows, "QUERIES": rows // padded, "KEYS": keys,
        "num_warps": warps, "num_stages": stages,
    }  # fmt: skip


def _tile_bytes(rows: int, keys: int, _warps: int, stages: int, row_bytes: int) -> int:
    """Of a program: queries, keys and values (two stages are the pages' and the products').

    No less than the compiler takes: for heads of 256 on compute capability 9.0 nearly that, on 8.0
    25 KB less, of fp32 60 KB.
    """
    return rows * row_bytes + max(2, stages - 2) * keys * (2 * row_bytes + 4) + 1024


@cache
def _shared_bytes(device: torch.device) -> int:
    """Shared memory that a program may have."""
    if device.type != "cuda":
        return 1 << 30  # interpreted
    properties = torch.cuda.get_device_properties(device)
    plain = properties.shared_memory_per_block  # all that torch says of AMD's
    return int(getattr(properties, "shared_memory_per_block_optin", plain))
