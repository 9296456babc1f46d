"""Places of weights in tables: against a plain loop, and the kernels against torch."""

from __future__ import annotations

import pytest
import torch

from pw_kernels import places, triton_places
from pw_kernels.places import places_of


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(("min_bits", "max_bits"), [(2, 4), (3, 3), (2, 8)])
def test_levels_and_sums_are_those_of_the_codes(min_bits: int, max_bits: int, backend: str) -> None:
    blocks, rows, cols, widths = 2, 2, 40, max_bits - min_bits + 1
    codes = torch.randint(1 << max_bits, (blocks, rows, cols)).to(torch.uint8)
    codes[0, 0] = 1  # all in one place
    tables = [torch.randn(blocks, rows, 1 << b) for b in range(min_bits, max_bits + 1)]
    values = torch.randn(blocks, rows, widths, cols)
    found = places_of(codes, min_bits, widths, backend=backend)
    levels, sums = found.levels(torch.cat(tables, 2)), found.sums(values)
    for width, table in enumerate(tables):
        index = codes.long() >> (widths - 1 - width)
        assert torch.equal(levels[:, :, width], table.gather(2, index))
        expected = torch.zeros_like(table).scatter_add_(2, index, values[:, :, width])
        offset = sum(t.shape[2] for t in tables[:width])
        own = sums[:, :, offset : offset + table.shape[2]]
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-5)


def test_values_may_be_one_row_for_all() -> None:
    codes = torch.randint(16, (1, 3, 20)).to(torch.uint8)
    values = torch.randn(1, 1, 1, 20).expand(1, 3, 3, 20)
    one, other = (places_of(codes, 2, 3, backend=b).sums(values) for b in ("torch", "triton"))
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_the_kernels_agree_with_torch() -> None:
    assert places._agrees(triton_places, torch.device("cpu"))
