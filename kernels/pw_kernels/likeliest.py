"""The likeliest token of each row of logits: the draw of greedy decoding, once a step.

Axes: S sequences, V columns of logits.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch
from torch import Tensor


def likeliest(logits: Tensor, vocabulary: int) -> Tensor:
    """The token of the greatest logit of each row, the first of equals: [S] int64.

    Args:
        logits: [S, V], any float dtype.
        vocabulary: Columns that are tokens.

    Returns:
        -1 where a row has a logit that is not finite, in any column.
    """
    kernels = _kernels() if logits.is_cuda and logits.stride(1) == 1 and len(logits) else None
    if kernels is not None:
        found: Tensor = kernels.likeliest(logits, vocabulary)
        return found
    broken = ~logits.sum(-1, dtype=torch.float32).isfinite()  # NaN and inf survive
    return logits[:, :vocabulary].argmax(-1).masked_fill(broken, -1)


@cache
def _kernels() -> ModuleType | None:
    try:
        from pw_kernels import triton_likeliest
    except ImportError:
        return None
    return triton_likeliest
