"""Where each interval of a sorted row is cut best: inner step of a one-dimensional k-means.

On a GPU one Triton kernel (`triton_splits`), elsewhere a few calls of torch: the reference.

Axes: R rows, K positions, C intervals of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pw_kernels.offline import kernels_for


def best_splits(
    mass: Tensor,
    moment: Tensor,
    bounds: Tensor,
    codes: Tensor | None = None,
    *,
    backend: str = "auto",
) -> Tensor:
    """[R, C] int64: the position in each interval that leaves most of SUM moment^2 / mass.

    The first such position counts. An interval of one position or none is "cut" at its end: the
    right part is empty.

    Args:
        mass: [R, K+1] float64, ascending; entry k sums the weights of positions [0, k).
        moment: [R, K+1] float64, the same of weight times value.
        bounds: [R, C+1] int64 from 0 to K, ascending; interval c is [bounds[c], bounds[c+1]).
        codes: [R, K] int64, the interval of each position, where it is known; see `interval_of`.
        backend: "auto", "torch" or "triton".
    """
    kernels = kernels_for("splits", backend, mass.device, _agrees)
    if kernels is not None:
        return kernels.best_splits(mass, moment, bounds)  # type: ignore[no-any-return]
    cols = mass.shape[1] - 1
    if codes is None:
        codes = interval_of(bounds, cols)
    start, end = bounds[:, :-1].contiguous(), bounds[:, 1:].contiguous()
    position = torch.arange(cols, device=codes.device)

    def part(sums: Tensor, ends: Tensor, sign: int) -> Tensor:
        """[R, K]: sums [R, K+1] between each position and an end of its interval."""
        outer = sums.gather(1, ends).gather(1, codes)
        return torch.sub(sums[:, :-1], outer, out=outer).mul_(sign)

    gain = squared(part(moment, start, 1), part(mass, start, 1))
    gain.add_(squared(part(moment, end, -1), part(mass, end, -1)))
    first = torch.zeros(mass.shape, dtype=torch.bool, device=codes.device)
    gain.masked_fill_(first.scatter_(1, start, True)[:, :-1], -torch.inf)
    best = gain.new_full(start.shape, -torch.inf).scatter_reduce_(1, codes, gain, "amax")
    hit = torch.where(gain == best.gather(1, codes), position, cols)
    split = torch.full_like(start, cols).scatter_reduce_(1, codes, hit, "amin")
    return torch.where(end - start > 1, split, end)


def interval_of(bounds: Tensor, cols: int) -> Tensor:
    """[R, K] int64: the interval of each position, given bounds [R, C+1]."""
    position = torch.arange(cols, device=bounds.device).expand(bounds.shape[0], -1).contiguous()
    return torch.searchsorted(bounds[:, 1:].contiguous(), position, right=True)


def squared(moment: Tensor, mass: Tensor) -> Tensor:
    """Moment^2 / mass, in place of both."""
    return moment.square_().div_(mass.clamp_min_(torch.finfo(mass.dtype).tiny))


def _agrees(kernels: object, device: torch.device) -> bool:
    """Whether the kernel gives what torch gives, on few rows of a usual size."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(7, 900, generator=generator, dtype=torch.float64).sort(1).values
    zero = torch.zeros(7, 1, dtype=torch.float64)
    mass = torch.cat([zero, torch.ones_like(values).cumsum(1)], 1).to(device)
    moment = torch.cat([zero, values.cumsum(1)], 1).to(device)
    bounds = torch.tensor([[0, 1, 40, 40, 900]], device=device).repeat(7, 1)
    found = kernels.best_splits(mass, moment, bounds)  # type: ignore[attr-defined]
    return torch.equal(found, best_splits(mass, moment, bounds, backend="torch"))
