"""Fused MoE for prompts: a tile of weights is decoded once for up to 128 tokens of its expert.

One launch for each module; widths mix freely. The kernel is `prompt.cu`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pw_kernels import nvrtc
from pw_kernels.bitplane import MAX_BITS, TILE_ROWS
from pw_kernels.cuda_routing import Arguments, kernel
from pw_kernels.pages import WeightPages

WARPS = 8  # of a block, each with a row tile
_REGISTER_BITS = 4  # wider tables lie in shared memory


@dataclass(frozen=True)
class PromptPlan:
    """Launch choices, from shapes alone.

    Attributes:
        token_tiles: A block has 8 times as many slots.
        widths: Least and greatest width that a block may have.
        overlap: Launches may begin while the one before ends.
        blocks: Blocks wanted on a multiprocessor.
    """

    token_tiles: int
    widths: tuple[int, int] = (2, MAX_BITS)
    overlap: bool = True
    blocks: int = 1


def shared_bytes(bits: int, token_tiles: int) -> int:
    """Dynamic shared memory of a block: tables, planes of the next tiles, two steps of inputs."""
    copies = 4 if bits <= 6 else 2 if bits == 7 else 1
    tables = WARPS * copies * (64 << bits) if bits > _REGISTER_BITS else 0
    return tables + WARPS * bits * 512 + 2 * 4 * token_tiles * 512


def launch(
    plan: PromptPlan,
    pages: WeightPages,
    groups: int,
    defines: Mapping[str, int | str],
    arguments: Arguments,
    device: torch.device,
) -> None:
    """Launch the kernel of one module."""
    low, high = plan.widths[0], min(plan.widths[1], pages.plane_pages.shape[1])
    constants = {
        **defines, "LOW": low, "HIGH": high, "NT": plan.token_tiles, "BLOCKS": plan.blocks,
        "TABLE_BITS": _REGISTER_BITS + 1, "FIRST": 1,
        "SHARED_BASE": nvrtc.reserved_shared_bytes(device.index or 0),
    }  # fmt: skip
    row_tiles = -(-pages.rows // TILE_ROWS)
    shared = max(shared_bytes(bits, plan.token_tiles) for bits in range(low, high + 1))
    kernel("prompt.cu", "prompts", constants, device).launch(
        (-(-row_tiles // WARPS), groups), 32 * WARPS, shared, arguments, overlap=plan.overlap
    )
