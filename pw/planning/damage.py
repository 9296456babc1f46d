"""Predicted damage of every width of every block, and the bits that hot experts keep.

The paper's formulas (ALGORITHMS 1.3), for block i of expert (l, e):

    g_i(b -> b') = max(0, s_i^b' - s_i^b)                                  transition cost
    D_i(b -> b') = mu(bucket of m[l, e]) * eta_i(prompt) * g_i(b -> b')    damage

That is the rule `buckets`. The default is `proportional`: a block does damage with every token that
visits it, so D_i = m[l, e] * eta_i * (damage per unit of router weight). That rate was measured on
few tokens where the calibration text seldom went, so it is shrunk toward the rate of its layer and
module, as the posterior mean under a prior worth `evidence_prior` (a_i = router weight of the
calibration text that the block saw, m0 = its share then):

    rate_i = (a_i * s_i / m0_i + prior * SUM s / SUM m0) / (a_i + prior)

`output_gradient` sensitivities are sums over the calibration tokens that each block saw, so they
contain the routing of the calibration text, hence the division by m0. With buckets mass counts
relative to the offline trace for the same reason: relative to uniform it would count twice
(measured on the bundled model at the bytes of uniform 4 bits, worse than uniform by 0.0019
[+0.0003, +0.0036] nats a token). `hessian` is a mean over a block's own tokens: no m0.

Both rules, and how the prior was chosen: docs/quality-planner.md.

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

_TINY = np.finfo(np.float64).tiny
_LEAST_SHARE = 1e-4  # of a layer's router weight: an expert that nobody visits still has an order


def transition_costs(sensitivity: FloatArray) -> FloatArray:
    """Cost [n, W] of going from the widest width to each; 0 at the widest, never falling as bits
    fall.
    """
    above = np.maximum(sensitivity - sensitivity[:, -1:], 0.0)
    return np.asarray(np.maximum.accumulate(above[:, ::-1], axis=1)[:, ::-1])


def damage_rates(
    table: BlockTable, trace: FloatArray, prior: float, *, contains_routing: bool
) -> FloatArray:
    """Damage [n, W] of each block per unit share of its layer's router weight.

    Args:
        table: Sensitivities.
        trace: [L, E] router weight sums of the calibration text, in tokens' worth.
        prior: Router weight with which a rate is shrunk toward that of its layer and module.
        contains_routing: Sensitivities are sums over all calibration tokens, not means over those
            of the block.
    """
    layers, experts = trace.shape
    scores = table.sensitivity.reshape(layers, experts, len(MODULES), -1)
    measured = table.measured.reshape(layers, experts, len(MODULES), 1)
    weight = np.where(measured, trace[:, :, None, None], 0.0)  # [L, E, M, 1]
    share = weight / np.maximum(trace.sum(1), _TINY)[:, None, None, None]
    own = scores / np.maximum(share, _TINY) if contains_routing else scores
    own = np.where(weight > 0, own, 0.0)
    seen = share.sum(1, keepdims=True)
    usual = (share * own).sum(1, keepdims=True) / np.maximum(seen, _TINY)  # [L, 1, M, W]
    usual = np.where(seen > 0, usual, scores.mean(1, keepdims=True))
    strength = weight / np.maximum(weight + prior, _TINY)
    rates = strength * own + (1.0 - strength) * usual
    return np.asarray(rates.reshape(table.sensitivity.shape))


class DamageModel:
    """Joins the offline table with routing mass and residuals.

    Args:
        table: Costs and sensitivities of all blocks.
        config: Rule, prior, bucket thresholds, multipliers, floors.
        trace: [L, E] router weight sums of the calibration text; None: not known. Then the rule is
            `buckets`, and mass counts relative to uniform.
    """

    def __init__(
        self, table: BlockTable, config: PlannerConfig, trace: FloatArray | None = None
    ) -> None:
        self.table, self.config = table, config
        self._costs = transition_costs(table.sensitivity)
        self._expected: FloatArray | None = None
        self._rates: FloatArray | None = None
        contained = config.metric == "output_gradient"
        if trace is not None and contained:
            self._expected = trace / np.maximum(trace.sum(1, keepdims=True), _TINY)
        if trace is not None and config.routing_rule == "proportional":
            rates = damage_rates(table, trace, config.evidence_prior, contains_routing=contained)
            self._rates = transition_costs(rates)
        self._layer_of = table.layer_of
        lowest, highest = int(table.widths[0]), int(table.widths[-1])
        hot = config.hot_expert_floor
        if hot is None:
            hot = lowest + 1 if self._rates is None else lowest
        self._lowest = lowest
        self._hot_floor = min(max(hot, lowest), highest)

    def damage(self, mass: FloatArray, eta: FloatArray | None = None) -> FloatArray:
        """D_i(widest -> b) [n, W].

        Args:
            mass: [L, E] routing mass.
            eta: [L, E, 2] prompt residual; None: 1.
        """
        if self._rates is None:
            scale, costs = self._multipliers()[self._buckets(mass)], self._costs
        else:
            scale, costs = np.maximum(mass, _LEAST_SHARE), self._rates
        scale = np.repeat(scale.ravel(), len(MODULES))
        if eta is not None:
            scale = scale * np.where(np.isfinite(eta) & (eta > 0), eta, 1.0).ravel()
        return np.asarray(scale[:, None] * costs)

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

    def _multipliers(self) -> FloatArray:
        found = np.empty(len(Bucket))
        found[Bucket.COLD] = self.config.cold_multiplier
        found[Bucket.WARM] = self.config.warm_multiplier
        found[Bucket.HOT] = self.config.hot_multiplier
        return found

    def _buckets(self, mass: FloatArray) -> IntArray:
        config = self.config
        found = buckets(mass, config.hot_mass, config.cold_mass, self._expected)
        return found.astype(np.int64)
