"""How exactly a GPU multiplies in the offline stages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def tensor_cores() -> Iterator[None]:
    """Let a GPU multiply float32 on its tensor cores, with 10 bits of mantissa; a CPU is as before.

    Its float32 units are several times slower and would bind the stages. Weights have 8 bits of
    mantissa (bf16), and the refit's errors fall as far (tests/pipelines/test_refit.py rounds so).
    """
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
