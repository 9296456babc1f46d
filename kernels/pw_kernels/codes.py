"""The nested code whose levels at all widths are nearest to what a row wants: inner step of a fit.

On a GPU one Triton kernel (`triton_codes`), elsewhere a few calls of torch: the reference.

Axes: R rows, W widths, C levels of all widths' tables side by side.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from pw_kernels.offline import kernels_for

_CODE = 255  # bits of a distance that make room for the code


def nearest_codes(
    tables: Tensor, wanted: Tensor, min_bits: int, *, backend: str = "auto"
) -> Tensor:
    """The code c that minimises SUM_b (table_b[c >> (max_bits - b)] - wanted_b)^2.

    Positive floats ascend with their bits. The code replaces the last eight of these, so that a
    minimum, which is quick, gives what argmin would; of distances within 2^-15 of each other the
    lowest code is taken.

    Args:
        tables: [..., C] float32, C = 2^min_bits + ... + 2^max_bits, contiguous.
        wanted: [..., W] float32, one level for each width.
        min_bits: Width of the first table.
        backend: "auto", "torch" or "triton".

    Returns:
        [...] uint8.
    """
    widths = wanted.shape[-1]
    if widths < 1 or min_bits + widths - 1 > 8:
        raise ValueError(f"{widths} widths from {min_bits} bits do not fit into a code of 8 bits")
    sizes = [1 << (min_bits + width) for width in range(widths)]
    if tables.shape != (*wanted.shape[:-1], sum(sizes)):
        raise ValueError(f"tables {tuple(tables.shape)} do not fit wanted {tuple(wanted.shape)}")
    if (kernels := kernels_for("codes", backend, tables.device, _agrees)) is not None:
        return kernels.nearest_codes(tables, wanted, min_bits)  # type: ignore[no-any-return]
    first, *rest = torch.split(tables, sizes, -1)
    cost = (first - wanted[..., :1]).square_()
    for width, table in enumerate(rest, 1):
        own = (table - wanted[..., width, None]).square_()
        own.view(*cost.shape, -1).add_(cost[..., None])
        cost = own
    numbers = torch.arange(sizes[-1], dtype=torch.int32, device=tables.device)
    bits = cost.view(torch.int32).bitwise_and_(~_CODE).bitwise_or_(numbers)
    return bits.amin(-1).bitwise_and_(_CODE).to(torch.uint8)


def _agrees(kernels: ModuleType, device: torch.device) -> bool:
    """Whether the kernel gives what torch gives, on a small case."""
    generator = torch.Generator().manual_seed(0)
    tables, wanted = (torch.randn(40, n, generator=generator).to(device) for n in (28, 3))
    expected = nearest_codes(tables, wanted, 2, backend="torch")
    return torch.equal(kernels.nearest_codes(tables, wanted, 2), expected)
