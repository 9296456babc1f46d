"""Where intervals are cut: against a plain search, and the kernel against torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pw_kernels import splits, triton_splits
from pw_kernels.splits import best_splits


def case(rows: int, cols: int, intervals: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of sorted rows, and random bounds: some intervals are empty or hold one position."""
    values = torch.randn(rows, cols, dtype=torch.float64).sort(1).values
    weights = torch.rand(rows, cols, dtype=torch.float64) + 0.01
    zero = torch.zeros(rows, 1, dtype=torch.float64)
    inner = torch.randint(cols + 1, (rows, intervals - 1)).sort(1).values
    ends = torch.tensor([0, cols]).expand(rows, 2)
    return (
        torch.cat([zero, weights.cumsum(1)], 1),
        torch.cat([zero, (weights * values).cumsum(1)], 1),
        torch.cat([ends[:, :1], inner, ends[:, 1:]], 1),
    )


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(("cols", "intervals"), [(24, 4), (70, 16), (600, 2)])
def test_no_cut_is_better(cols: int, intervals: int, backend: str) -> None:
    mass, moment, bounds = case(3, cols, intervals)
    found = best_splits(mass, moment, bounds, backend=backend)
    for row in range(3):
        for start, end, cut in zip(bounds[row], bounds[row, 1:], found[row], strict=False):
            if end - start < 2:
                assert cut == end
                continue
            places = torch.arange(int(start) + 1, int(end))
            left, right = places - places + start, places - places + end
            gains = sum(
                (moment[row, b] - moment[row, a]).square() / (mass[row, b] - mass[row, a])
                for a, b in ((left, places), (places, right))
            )
            assert cut in places
            assert gains[cut - start - 1] >= gains.max() * (1 - 1e-12)


def test_the_first_of_equal_cuts_counts() -> None:
    mass = torch.arange(5.0, dtype=torch.float64)[None]
    moment = torch.zeros_like(mass)  # every cut gains nothing
    for backend in ("torch", "triton"):
        assert best_splits(mass, moment, torch.tensor([[0, 4]]), backend=backend).tolist() == [[1]]


def test_the_kernel_agrees_with_torch() -> None:
    assert splits._agrees(triton_splits, torch.device("cpu"))
