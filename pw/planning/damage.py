"""Predicted damage of every width of every block, and the bits that hot experts keep.

The paper's formulas (ALGORITHMS 1.3), for block i of expert (l, e):

    g_i(b -> b') = max(0, s_i^b' - s_i^b)                                  transition cost
    D_i(b -> b') = mu(bucket of m[l, e]) * eta_i(prompt) * g_i(b -> b')    damage

`output_gradient` sensitivities are sums over the calibration tokens that each block saw, so they
contain the routing of the calibration text. Multiplying by mass relative to uniform would count it
twice: measured on the bundled model at the bytes of uniform 4 bits, that is worse than uniform by
0.0019 [+0.0003, +0.0036] nats a token, multipliers of 1 are not (-0.0006). So mass counts relative
to the offline trace there: an expert is hot when it is busier now than it was then.

The planner wants one number per width, D_i(widest -> b), whose differences are the damages of all
transitions. They are exactly the paper's where s falls with b. Where a measured s rises with b
(noise), the narrower width counts as bad as the wider one, so that damage never falls as bits fall.
"""

from __future__ import annotations

import numpy as np

from pw.blocks import MODULES
from pw.config import PlannerConfig
from pw.planning.ladder import FloatArray, IntArray
from pw.planning.planner import PlannerState
from pw.planning.routing import Bucket, buckets
from pw.planning.table import BlockTable


def transition_costs(sensitivity: FloatArray) -> FloatArray:
    """Cost [n, W] of going from the widest width to each; 0 at the widest, never falling as bits
    fall.
    """
    above = np.maximum(sensitivity - sensitivity[:, -1:], 0.0)
    return np.asarray(np.maximum.accumulate(above[:, ::-1], axis=1)[:, ::-1])


class DamageModel:
    """Joins the offline table with routing mass and residuals.

    Args:
        table: Costs and sensitivities of all blocks.
        config: Bucket thresholds, multipliers, floors.
        expected: [L, E] routing mass that the sensitivities already contain; None: they contain
            none, and mass counts relative to uniform (the paper's way, right for `hessian`).
    """

    def __init__(
        self, table: BlockTable, config: PlannerConfig, expected: FloatArray | None = None
    ) -> None:
        self.table, self.config = table, config
        self._expected = expected
        self._costs = transition_costs(table.sensitivity)
        self._layer_of = table.layer_of
        lowest, highest = int(table.widths[0]), int(table.widths[-1])
        hot = config.hot_expert_floor
        self._lowest = lowest
        self._hot_floor = min(max(lowest + 1 if hot is None else hot, lowest), highest)

    def damage(self, mass: FloatArray, eta: FloatArray | None = None) -> FloatArray:
        """D_i(widest -> b) [n, W].

        Args:
            mass: [L, E] routing mass.
            eta: [L, E, 2] prompt residual; None: 1.
        """
        config = self.config
        multiplier = np.empty(len(Bucket))
        multiplier[Bucket.COLD] = config.cold_multiplier
        multiplier[Bucket.WARM] = config.warm_multiplier
        multiplier[Bucket.HOT] = config.hot_multiplier
        scale = np.repeat(multiplier[self._buckets(mass)].ravel(), len(MODULES))
        if eta is not None:
            scale = scale * np.where(np.isfinite(eta) & (eta > 0), eta, 1.0).ravel()
        return np.asarray(scale[:, None] * self._costs)

    def floors(self, mass: FloatArray) -> IntArray:
        """Least bits [n]: those of hot experts, else the narrowest width."""
        hot = self._buckets(mass) == Bucket.HOT
        floors = np.where(hot, self._hot_floor, self._lowest).astype(np.int64)
        return np.repeat(floors.ravel(), len(MODULES))

    def state(
        self, bits: IntArray, ceil: IntArray, mass: FloatArray, eta: FloatArray | None = None
    ) -> PlannerState:
        """The planner's view of now.

        Args:
            bits: [n] committed bits.
            ceil: [n] most bits.
            mass: [L, E] routing mass.
            eta: [L, E, 2] prompt residual; None: 1.
        """
        return PlannerState(
            widths=self.table.widths,
            bits=bits,
            floors=self.floors(mass),
            ceil=ceil,
            cost_bytes=self.table.cost_bytes,
            damage=self.damage(mass, eta),
            layer_of=self._layer_of,
            layer_floor=self.config.layer_floor,
        )

    def _buckets(self, mass: FloatArray) -> IntArray:
        config = self.config
        found = buckets(mass, config.hot_mass, config.cold_mass, self._expected)
        return found.astype(np.int64)
