"""The nested code whose levels at all widths are nearest to what a row wants: inner step of a fit.

On a GPU one Triton kernel (`triton_codes`), elsewhere a few calls of torch: the reference.

Axes: R rows, W widths, C levels of all widths' tables side by side, narrow tables first.
"""

from __future__ import annotations

import warnings
from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

BACKENDS = ("auto", "torch", "triton")

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
        backend: One of BACKENDS.

    Returns:
        [...] uint8.
    """
    widths = wanted.shape[-1]
    if widths < 1 or min_bits + widths - 1 > 8:
        raise ValueError(f"{widths} widths from {min_bits} bits do not fit into a code of 8 bits")
    sizes = [1 << (min_bits + width) for width in range(widths)]
    if tables.shape != (*wanted.shape[:-1], sum(sizes)):
        raise ValueError(f"tables {tuple(tables.shape)} do not fit wanted {tuple(wanted.shape)}")
    if (kernels := _triton(backend, tables)) is not None:
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


def _triton(backend: str, x: Tensor) -> ModuleType | None:
    """The kernel, where it is to be used."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "torch" or (backend == "auto" and x.device.type != "cuda"):
        return None
    try:
        kernels = import_module("pw_kernels.triton_codes")
    except ImportError:
        if backend == "triton":
            raise ValueError("backend 'triton' is not installed") from None
        return None
    return kernels if backend == "triton" or _works(kernels, x.device) else None


@cache
def _works(kernels: ModuleType, device: torch.device) -> bool:
    """Whether the kernel agrees with torch here, on a small case; if not, says so once."""
    generator = torch.Generator().manual_seed(0)
    tables, wanted = (torch.randn(40, n, generator=generator).to(device) for n in (28, 3))
    try:
        agrees = torch.equal(
            kernels.nearest_codes(tables, wanted, 2),
            nearest_codes(tables, wanted, 2, backend="torch"),
        )
    except Exception as error:  # a compiler's, of any kind
        warnings.warn(f"the kernel for codes does not run, torch does it: {error}", stacklevel=4)
        return False
    if not agrees:
        warnings.warn("the kernel for codes is wrong here, torch does it", stacklevel=4)
    return agrees
