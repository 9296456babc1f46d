"""`splits.best_splits` in Triton: every interval is read once, nothing else is written than splits.

In torch each position passes through memory some fifty times, and maxima are made by atomics that
wait for each other.

Axes: R rows, K positions, C intervals of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_LEAST, _MOST = 16, 256  # positions that a program looks at together


@triton.jit
def best_splits_kernel(
    mass,  # [R, K + 1] float64
    moment,  # [R, K + 1] float64
    bounds,  # [R, C + 1] int64
    splits,  # [R, C] int64
    cols,
    intervals,
    TINY: tl.constexpr,
    POSITIONS: tl.constexpr,
):
    """One interval."""
    place = tl.program_id(0).to(tl.int64)
    row = place // intervals
    bound = bounds + place + row
    start = tl.load(bound)
    end = tl.load(bound + 1)
    mass += row * (cols + 1)
    moment += row * (cols + 1)
    mass_before, mass_after = tl.load(mass + start), tl.load(mass + end)
    moment_before, moment_after = tl.load(moment + start), tl.load(moment + end)
    best = mass_before * 0 - float("inf")
    split = end
    for first in range(start, end, POSITIONS):
        position = tl.minimum(first + tl.arange(0, POSITIONS), end)
        here_mass, here_moment = tl.load(mass + position), tl.load(moment + position)
        left, right = here_moment - moment_before, moment_after - here_moment
        left = left * left / tl.maximum(here_mass - mass_before, TINY)
        right = right * right / tl.maximum(mass_after - here_mass, TINY)
        gain = tl.where((position > start) & (position < end), left + right, -float("inf"))
        top = tl.max(gain, 0)
        at = tl.min(tl.where(gain == top, position, end), 0)
        split = tl.where(top > best, at, split)
        best = tl.maximum(top, best)
    tl.store(splits + place, split)


def best_splits(mass: Tensor, moment: Tensor, bounds: Tensor) -> Tensor:
    """See `splits.best_splits`."""
    rows, cols, intervals = mass.shape[0], mass.shape[1] - 1, bounds.shape[1] - 1
    splits = torch.empty((rows, intervals), dtype=torch.int64, device=mass.device)
    positions = min(max(triton.next_power_of_2(cols // intervals), _LEAST), _MOST)
    best_splits_kernel[(splits.numel(),)](
        mass.contiguous(),
        moment.contiguous(),
        bounds.contiguous(),
        splits,
        cols,
        intervals,
        TINY=torch.finfo(mass.dtype).tiny,
        POSITIONS=positions,
        num_warps=max(1, positions // 64),
    )
    return splits
