"""A descent through columns: the kernel against torch, and what falls is what the codes say."""

from __future__ import annotations

import pytest
import torch

from pw_kernels import descents, triton_descents
from pw_kernels.descents import descend


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
