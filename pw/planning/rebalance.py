"""Trading planes between blocks at constant bytes, when routing or prompts have moved on.

Release and reload follow the memory; under steady pressure neither happens, and an expert that
became hot would stay narrow for good (RELIABILITY section 5, rule 8). Pure, like the planner.

The ideal is the best allocation of the bytes that the blocks hold now plus `spare_bytes`. Blocks
move only toward it: planes of those above it pay for those below, most damage undone per copied
byte first. Small gains are left alone, so that noise in the routing mass moves nothing; a block
below its floor is raised whatever the gain.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pw.planning.ladder import pick
from pw.planning.planner import Plan, PlannerState, plan, plan_reload


@dataclass(frozen=True, slots=True)
class Trade:
    """Reductions to make first, and the raises that their bytes pay for."""

    down: Plan
    up: Plan

    @property
    def gain(self) -> float:
        """Predicted damage undone, net."""
        return -self.up.damage - self.down.damage


def rebalance(
    state: PlannerState, transfer_bytes: int, spare_bytes: int = 0, least_gain: float = 0.1
) -> Trade | None:
    """A trade that lowers the predicted damage, or None where none is worth its copies.

    Args:
        state: Blocks, floors, costs, damages.
        transfer_bytes: Most bytes to raise, that is, to copy from the host.
        spare_bytes: Free bytes that the raises may take besides.
        least_gain: Fraction of the present damage that must be won.
    """
    top = replace(state, bits=np.maximum(state.bits, state.ceil))
    ideal = plan(top, top.total_bytes - state.total_bytes - spare_bytes).apply(top.bits)
    above = replace(state, floors=np.maximum(state.floors, np.minimum(state.bits, ideal)))
    below = replace(state, ceil=np.minimum(np.maximum(state.bits, ideal), top.bits))
    payable = plan(above, above.total_bytes).bytes + spare_bytes
    up = plan_reload(below, min(transfer_bytes, payable))
    if not up.moves:
        return None
    trade = Trade(plan(above, up.bytes - spare_bytes), up)
    urgent = (state.bits < np.minimum(state.floors, state.ceil))[up.block].any()
    present = float(pick(state.transposed()[1], state.index(state.bits)).sum())
    if not urgent and trade.gain <= least_gain * present:
        return None
    return trade
