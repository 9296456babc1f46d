"""Any-Precision LLM: one width for every block. Its steps between widths are blind.

Axes: n blocks, W widths.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pw.errors import BudgetError

Ints = NDArray[np.int64]


def uniform(blocks: int, bits: int) -> Ints:
    """One width for all blocks."""
    return np.full(blocks, bits, dtype=np.int64)


def stepped(costs: Ints, widths: range, budget_bytes: int, seed: int | None = 0) -> Ints:
    """The widest uniform width that fits, then one bit more for as many blocks as fit.

    Args:
        costs: [n, W] bytes.
        widths: Ascending.
        budget_bytes: Of all blocks.
        seed: Blocks are raised in an order drawn from this seed; None: in geometry order.

    Raises:
        BudgetError: The narrowest width does not fit.
    """
    totals = costs.sum(0)
    fitting = np.flatnonzero(totals <= budget_bytes)
    if not len(fitting):
        raise BudgetError(f"{totals[0]:,} bytes are the least, {budget_bytes:,} are allowed")
    base = int(fitting[-1])
    bits = uniform(len(costs), widths[base])
    if base + 1 == len(widths):
        return bits
    order = np.arange(len(costs))
    if seed is not None:
        order = np.random.default_rng(seed).permutation(order)
    left = budget_bytes - int(totals[base])
    for block in order.tolist():
        more = int(costs[block, base + 1] - costs[block, base])
        if more <= left:
            bits[block] += 1
            left -= more
    return bits
