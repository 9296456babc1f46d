"""Shares CPU kernel calls among threads. Knows no kernel.

Plain Python threads, because the jitted functions release the interpreter lock: numba's own
parallel loops bring a second OpenMP beside torch's, which aborts the process after a fork.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

WORTH_NANOSECONDS = 100_000  # work below this is done at once by the calling thread


def split(costs: NDArray[np.float64]) -> list[tuple[int, int]]:
    """Cut items into contiguous ranges of about equal cost, one a thread of `torch`.

    Args:
        costs: Estimated nanoseconds of each item.

    Returns:
        Non-empty [first, last) ranges that cover all items; one if the work is small.
    """
    sums = np.cumsum(costs)
    total = float(sums[-1]) if len(sums) else 0.0
    shares = torch.get_num_threads() if total > WORTH_NANOSECONDS else 1
    if shares == 1:
        return [(0, len(costs))]
    goals = total * np.arange(1, shares) / shares
    cuts = [0, *(np.searchsorted(sums, goals) + 1).tolist(), len(costs)]
    return [(a, min(b, len(costs))) for a, b in pairwise(cuts) if a < b]


def run(calls: Sequence[Callable[[], None]]) -> None:
    """Run calls at the same time, the first on the calling thread; returns when all are done."""
    others = [_pool(len(calls) - 1).submit(call) for call in calls[1:]] if len(calls) > 1 else []
    calls[0]()
    for other in others:
        other.result()


@cache
def _pool(workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers, thread_name_prefix="pw-kernel")
