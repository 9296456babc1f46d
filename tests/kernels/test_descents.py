"""A descent through columns: nearest codes against a plain search, the kernel against torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pw_kernels import descents, triton_descents
from pw_kernels.descents import descend


def nearest(tables: Tensor, wanted: Tensor, min_bits: int, backend: str) -> Tensor:
    """Codes [E, N] of the levels nearest to wanted [E, N, W]: a descent through one column."""
    ones, zero = torch.ones(len(tables), 1, 1), torch.zeros_like(wanted)[..., None]
    columns = (torch.ones_like(wanted), ones, wanted[..., None], zero)
    return descend(tables, tables, *columns, min_bits, backend=backend)[0][..., 0]


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(
    ("rows", "min_bits", "max_bits"), [((3, 7), 2, 6), ((2, 35), 2, 4), ((1, 5), 3, 8)]
)
def test_no_code_is_nearer(
    rows: tuple[int, int], min_bits: int, max_bits: int, backend: str
) -> None:
    widths = range(min_bits, max_bits + 1)
    tables = [torch.randn(*rows, 1 << bits) for bits in widths]
    wanted = torch.randn(*rows, len(widths))
    found = nearest(torch.cat(tables, 2), wanted, min_bits, backend)
    assert found.dtype == torch.uint8
    every, codes = torch.zeros(*rows, 1 << max_bits).double(), torch.arange(1 << max_bits)
    for width, bits in enumerate(widths):
        level = tables[width][..., codes >> (max_bits - bits)]
        every += (level.double() - wanted[..., width, None]).square()
    chosen = every.gather(-1, found.long()[..., None])[..., 0]
    assert (chosen <= every.min(-1).values * (1 + 2**-14)).all()
    assert len(found.unique()) > 1


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_of_equal_codes_the_lowest_is_taken(backend: str) -> None:
    tables, wanted = torch.randn(2, 3, 28), torch.randn(2, 3, 3)
    tables[..., 4:] = 0.5  # all codes below one of the four narrow levels cost the same
    narrow = (tables[..., :4] - wanted[..., :1]).abs().argmin(2)
    assert nearest(tables, wanted, 2, backend).tolist() == (4 * narrow).tolist()


@pytest.mark.parametrize(("min_bits", "max_bits", "columns"), [(2, 4, 8), (3, 8, 5), (2, 2, 16)])
def test_both_descents_take_the_same_codes(min_bits: int, max_bits: int, columns: int) -> None:
    blocks, rows, widths = 2, 9, max_bits - min_bits + 1
    sizes = [1 << bits for bits in range(min_bits, max_bits + 1)]
    tables, roots = torch.randn(blocks, rows, sum(sizes)), torch.rand(blocks, rows, widths)
    scaled = tables * roots.repeat_interleave(torch.tensor(sizes), 2)
    inputs = torch.randn(blocks, 40, columns)
    whole = torch.randn(2, blocks, rows, widths, 2 * columns)
    levels, pulls = whole[..., columns // 2 : columns // 2 + columns]  # of a strip, not contiguous
    given = (tables, scaled, roots, inputs.mT @ inputs, levels, pulls, min_bits)
    codes, falls = descend(*given, backend="torch")
    found, fell = descend(*given, backend="triton")
    same = (codes == found).all(2)  # near ties may go either way, and what follows with them
    assert same.float().mean() > 0.9
    torch.testing.assert_close(fell[same], falls[same], rtol=1e-3, atol=1e-4)
    for width, bits in enumerate(range(min_bits, max_bits + 1)):
        table = tables[..., sum(sizes[:width]) :][..., : 1 << bits]
        chosen = table.gather(2, codes.long() >> (max_bits - bits))
        torch.testing.assert_close(falls[:, :, width], levels[:, :, width] - chosen)


def test_the_kernel_agrees_with_torch() -> None:
    assert descents._agrees(triton_descents, torch.device("cpu"))
