"""The places of weights in the tables of all widths, read and added up: inner steps of a fit.

On a GPU two Triton kernels (`triton_places`), elsewhere torch with an index: the reference.

Axes: E blocks, N rows, K columns, W widths, C levels of all widths' tables side by side.
"""

from __future__ import annotations

from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from pw_kernels.offline import kernels_for


class Places(Protocol):
    """Places of the weights of some rows, by their codes."""

    def levels(self, tables: Tensor) -> Tensor:
        """[E, N, C] -> [E, N, W, K]: what the tables say at every weight's place."""

    def sums(self, values: Tensor) -> Tensor:
        """[E, N, W, K] -> [E, N, C]: the sum of the values at every place, the transpose."""


def places_of(codes: Tensor, min_bits: int, widths: int, *, backend: str = "auto") -> Places:
    """Places of codes [E, N, K] uint8 in float32 tables of `widths` widths from `min_bits`.

    Args:
        codes: Of the widest width.
        min_bits: Width of the first table.
        widths: W.
        backend: "auto", "torch" or "triton".
    """
    kernels = kernels_for("places", backend, codes.device, _agrees)
    made: Places = (kernels.SortedPlaces if kernels else IndexedPlaces)(codes, min_bits, widths)
    return made


class IndexedPlaces:
    """An index of 8 bytes for every weight and width.

    Args:
        codes: [E, N, K] uint8.
        min_bits: Width of the first table.
        widths: W.
    """

    def __init__(self, codes: Tensor, min_bits: int, widths: int) -> None:
        width = torch.arange(widths, device=codes.device)
        sizes = 1 << (min_bits + width)  # [W]
        offsets, shifts = sizes.cumsum(0) - sizes, width.flip(0)
        index = (codes.long()[..., None] >> shifts) + offsets
        self._index = index.transpose(2, 3).flatten(2)  # [E, N, W * K]
        self._shape = (*codes.shape[:2], widths, codes.shape[2])
        self._levels = int(sizes.sum())

    def levels(self, tables: Tensor) -> Tensor:
        """See `Places.levels`."""
        return tables.gather(2, self._index).view(self._shape)

    def sums(self, values: Tensor) -> Tensor:
        """See `Places.sums`."""
        sums = values.new_zeros((*self._shape[:2], self._levels))
        return sums.scatter_add_(2, self._index, values.reshape(self._index.shape))


def _agrees(kernels: ModuleType, device: torch.device) -> bool:
    """Whether the kernels give what torch gives, on few rows of a usual size."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(256, (2, 5, 700), generator=generator).to(device, torch.uint8)
    tables = torch.randn(2, 5, 508, generator=generator).to(device)
    values = torch.randn(2, 5, 7, 700, generator=generator).to(device)
    found, expected = kernels.SortedPlaces(codes, 2, 7), IndexedPlaces(codes, 2, 7)
    return torch.equal(found.levels(tables), expected.levels(tables)) and torch.allclose(
        found.sums(values), expected.sums(values), atol=1e-4
    )
