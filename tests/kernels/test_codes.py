"""The nearest nested code: against a plain search, and the kernel against torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pw_kernels import codes
from pw_kernels.codes import nearest_codes


def case(rows: tuple[int, ...], min_bits: int, max_bits: int) -> tuple[Tensor, Tensor]:
    widths = max_bits - min_bits + 1
    size = sum(1 << bits for bits in range(min_bits, max_bits + 1))
    return torch.randn(*rows, size), torch.randn(*rows, widths)


def distances(tables: Tensor, wanted: Tensor, min_bits: int) -> Tensor:
    """Of every code [..., 2^max_bits], in float64, one width after the other."""
    max_bits = min_bits + wanted.shape[-1] - 1
    codes, offset = torch.arange(1 << max_bits), 0
    total = torch.zeros(*wanted.shape[:-1], len(codes), dtype=torch.float64)
    for index, bits in enumerate(range(min_bits, max_bits + 1)):
        level = tables[..., offset + (codes >> (max_bits - bits))]
        total += (level.double() - wanted[..., index, None].double()).square()
        offset += 1 << bits
    return total


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(
    ("rows", "min_bits", "max_bits"), [((3, 7), 2, 6), ((70,), 2, 4), ((5,), 3, 8), ((4,), 2, 2)]
)
def test_no_code_is_nearer(
    rows: tuple[int, ...], min_bits: int, max_bits: int, backend: str
) -> None:
    tables, wanted = case(rows, min_bits, max_bits)
    found = nearest_codes(tables, wanted, min_bits, backend=backend)
    assert found.dtype == torch.uint8
    assert found.shape == rows
    every = distances(tables, wanted, min_bits)
    chosen = every.gather(-1, found.long()[..., None])[..., 0]
    assert (chosen <= every.min(-1).values * (1 + 2**-14)).all()
    assert len(found.unique()) > 1


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_of_equal_codes_the_lowest_is_taken(backend: str) -> None:
    tables, wanted = case((6,), 2, 4)
    tables[:, 4:] = 0.5  # all codes below one of the four narrow levels cost the same
    found = nearest_codes(tables, wanted, 2, backend=backend)
    narrow = (tables[:, :4] - wanted[:, :1]).abs().argmin(1)
    assert found.tolist() == (4 * narrow).tolist()


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"tables \(3, 12\) do not fit wanted \(3, 3\)"):
        nearest_codes(torch.zeros(3, 12), torch.zeros(3, 3), 2)
    with pytest.raises(ValueError, match="8 widths from 2 bits do not fit"):
        nearest_codes(torch.zeros(3, 1020), torch.zeros(3, 8), 2)
    with pytest.raises(ValueError, match="backend must be one of"):
        nearest_codes(torch.zeros(3, 12), torch.zeros(3, 2), 2, backend="cuda")


def test_the_kernel_agrees_with_torch() -> None:
    from pw_kernels import triton_codes

    assert codes._agrees(triton_codes, torch.device("cpu"))
