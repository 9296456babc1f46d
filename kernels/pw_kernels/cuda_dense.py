"""Routed experts from unquantized weights on NVIDIA GPUs, in fixed grids: the baseline's fast form.

The same routing, grouped matmul and last sum as the prompts of `cuda_prefill`, without planes to
expand. Nothing waits for the device, so a call can be captured in a CUDA graph.

Axes as in `dense.py`; S = T * k slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from pw_kernels.cuda_moe import MOST_EXPERTS
from pw_kernels.cuda_routing import KINDS, combine, route
from pw_kernels.reference import Activation
from pw_kernels.slots import Choice
from pw_kernels.triton_grouped import grouped_kernel

_MANY_SLOTS = 24  # of an expert on average: from here tiles are those of prompts


@dataclass(frozen=True)
class _Tile:
    slots: int
    rows: int
    step: int
    warps: int
    stages: int


_DECODE = _Tile(slots=16, rows=64, step=128, warps=4, stages=4)
_PROMPT = _Tile(slots=128, rows=128, step=64, warps=8, stages=3)
_FULL = _Tile(slots=16, rows=64, step=32, warps=4, stages=2)  # of fp32, which is for comparisons


@dataclass(frozen=True)
class _NoPlanes:
    """What `route` reads of blocks: all of one width, no tables."""

    experts: int
    bits: Tensor
    lut_offset: Tensor
    possible_widths: tuple[int, int] = (0, 0)


@cache
def _no_planes(experts: int, device: torch.device) -> Any:
    zeros = torch.zeros(experts, dtype=torch.int32, device=device)
    return _NoPlanes(experts, zeros, zeros)


def fits(x: Tensor, gate_up: Tensor, down: Tensor, activation: Activation) -> bool:
    """Whether these kernels can take a call; anything else is for `dense.dense_moe`."""
    return (
        x.is_cuda
        and x.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and x.dtype == gate_up.dtype == down.dtype
        and gate_up.is_contiguous()
        and down.is_contiguous()
        and isinstance(activation, str)
        and activation in KINDS
        and gate_up.shape[1] == 2 * down.shape[2]
        and down.shape[1] % 4 == 0
        and gate_up.shape[0] <= MOST_EXPERTS
        and torch.cuda.get_device_capability(x.device) >= (8, 0)
    )


def dense_moe(
    x: Tensor,
    topk_ids: Tensor | Choice,
    topk_weights: Tensor | None,
    gate_up: Tensor,
    down: Tensor,
    *,
    activation: str,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    live: Tensor | None = None,
) -> Tensor:
    """As `dense.dense_moe`, for calls that `fits` takes; sums are in fp32.

    Tokens from live[0] on, an int32 on the device, are padding and give zero.
    """
    experts, hidden_size, inner = down.shape
    count, top_k = topk_ids.numel(), topk_ids.shape[1]
    out = torch.empty(x.shape[0], hidden_size, dtype=x.dtype, device=x.device)
    if not count:
        return out
    full = x.dtype == torch.float32
    tile = _FULL if full else _DECODE if count < _MANY_SLOTS * experts else _PROMPT
    plain = _no_planes(experts, x.device)
    routed = route(topk_ids, topk_weights, (plain, plain), tile.slots, 0, None, live)
    hidden = torch.empty(count, inner, dtype=x.dtype, device=x.device)
    # Slots without an expert are not written: the sum of 16-bit results leaves them out itself.
    new = torch.zeros if full else torch.empty
    results = new(count, hidden_size, dtype=torch.float32, device=x.device)
    for source, matrices, target, bias, gated in (
        (x.contiguous(), gate_up, hidden, gate_up_bias, True),
        (hidden, down, results, down_bias, False),
    ):
        width = target.shape[1]
        part = tile.rows // 2 if gated else tile.rows
        grouped_kernel[(triton.cdiv(width, part), len(routed.slots))](
            source, matrices, target, routed.work[0], routed.slots,
            routed.weights if bias is None else bias.float().contiguous(), routed.weights,
            count, 0, experts, TOP_K=top_k if gated else 1, COLS=matrices.shape[2],
            ALL_ROWS=matrices.shape[1], WIDTH=width, SLOTS=tile.slots, ROWS=tile.rows,
            STEP=tile.step, GATED=gated, KIND=KINDS[activation] if gated else 0,
            HAS_BIAS=bias is not None, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    if full:
        return results.view(-1, top_k, hidden_size).sum(1)
    combine(results, routed, out)
    return out
