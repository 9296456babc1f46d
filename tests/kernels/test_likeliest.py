"""The likeliest token of each row: the kernel beside torch."""

from __future__ import annotations

import os

import pytest
import torch

from pw_kernels.likeliest import likeliest

kernels = pytest.importorskip("pw_kernels.triton_likeliest")

DEVICE = "cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("columns", "vocabulary"), [(40, 37), (8192, 8192), (20000, 19990)])
def test_the_kernel_finds_what_torch_finds(
    columns: int, vocabulary: int, dtype: torch.dtype
) -> None:
    logits = torch.randn(6, columns).to(dtype)
    logits[0, vocabulary - 1] = 30  # the last
    logits[1, [3, vocabulary // 2]] = 30  # equals
    logits[2, 5] = torch.nan
    logits[3, columns - 1] = torch.inf  # of no token, where there are such
    logits[4, 7] = -torch.inf
    logits[5] = -1000
    expected = likeliest(logits, vocabulary)
    assert expected.tolist() == [vocabulary - 1, 3, -1, -1, -1, 0]
    moved = logits.to(DEVICE)
    assert kernels.likeliest(moved, vocabulary).tolist() == expected.tolist()
    wide = torch.cat((moved, moved), 1)[:, :columns]  # rows that are further apart
    assert kernels.likeliest(wide, vocabulary).tolist() == expected.tolist()


def test_no_row_has_no_token() -> None:
    assert likeliest(torch.zeros(0, 9), 9).tolist() == []
