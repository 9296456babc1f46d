"""Static allocation of widths for a number of bytes, from any score of damage.

`exact` solves the integer program (HiGHS); `hull` is the product's own planner on the same numbers.
GEMQ allocates over all layers at once, MxMoE gives each layer the same share and sums distances
where others sum squares.

Axes: n blocks, W widths, L layers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import LinearConstraint, milp
from scipy.sparse import coo_array

from pw.errors import BudgetError
from pw.planning.planner import PlannerState, allocate

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_GAP = 1e-4  # of the optimum, relative
_SECONDS = 60.0


def exact(
    damage: Floats, costs: Ints, widths: range, budget_bytes: int, layer_of: Ints | None = None
) -> Ints:
    """Widths [n] of least total damage within the budget, by integer programming.

    Args:
        damage: [n, W] damage of each block at each width, any unit.
        costs: [n, W] bytes.
        widths: Ascending.
        budget_bytes: Of all blocks.
        layer_of: [n] layer slot; given, each layer gets the same share of the budget and no more.

    Raises:
        BudgetError: The narrowest widths do not fit, or no optimum was found in time.
    """
    blocks, count = costs.shape
    groups = np.zeros(blocks, dtype=np.int64) if layer_of is None else layer_of
    places = np.arange(blocks * count)
    one_each = coo_array((np.ones(blocks * count), (places // count, places)))
    spent = coo_array((costs.ravel().astype(np.float64), (np.repeat(groups, count), places)))
    share = budget_bytes / (int(groups.max()) + 1)
    scale = max(float(damage.max()), np.finfo(np.float64).tiny)
    found = milp(
        damage.ravel() / scale,
        integrality=np.ones(blocks * count),
        bounds=(0, 1),
        constraints=[
            LinearConstraint(one_each.tocsr(), 1, 1),
            LinearConstraint(spent.tocsr(), 0, share),
        ],
        options={"mip_rel_gap": _GAP, "time_limit": _SECONDS},
    )
    if found.x is None:
        raise BudgetError(f"no allocation of {budget_bytes:,} bytes was found: {found.message}")
    chosen = found.x.reshape(blocks, count).argmax(1)
    return np.asarray(widths[0] + chosen, dtype=np.int64)


def hull(damage: Floats, costs: Ints, widths: range, budget_bytes: int) -> Ints:
    """The same by the product's planner: convex hulls and an exact fill.

    Raises:
        BudgetError: The narrowest widths do not fit.
    """
    count = len(costs)
    state = PlannerState(
        widths=np.array(widths, dtype=np.int64),
        bits=np.full(count, widths[-1]),
        floors=np.full(count, widths[0]),
        ceil=np.full(count, widths[-1]),
        cost_bytes=costs,
        damage=damage,
    )
    return allocate(state, budget_bytes)
