"""What the product's planner would hold, from an artifact's tables and what it sees as it runs.

Axes: L MoE layers, E experts, M modules (gate_up, down), n blocks, W widths.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pw.config import PlannerConfig
from pw.errors import BudgetError
from pw.evaluation.lab.costs import Costs
from pw.evaluation.lab.model import Bits, LabModel
from pw.planning.damage import DamageModel
from pw.planning.planner import PlannerState, allocate, plan
from pw.planning.routing import RoutingStats
from pw.planning.table import BlockTable
from pw.store.artifact import Artifact

Floats = NDArray[np.float64]


class ProductPlanner:
    """Allocations as the adaptive policy makes them at its start and moves toward later.

    Args:
        model: Geometry and widths.
        tables: Artifact whose sensitivities and routing trace count; they may rest on other text
            than the weights' artifact.
        costs: [n, W] bytes.
        config: The planner's dials.
        planned: Costs that the planner believes in, if others than `costs`.
    """

    def __init__(
        self,
        model: LabModel,
        tables: Artifact,
        costs: Costs,
        config: PlannerConfig | None = None,
        planned: Costs | None = None,
    ) -> None:
        self.config = config or PlannerConfig()
        self.costs, self._widths = costs, model.widths
        self._geometry, self._tables = model.geometry, tables
        widths = np.array(model.widths, dtype=np.int64)
        believed = costs if planned is None else planned
        table = BlockTable.from_artifact(
            tables.table("sensitivity"), self.config.metric, model.geometry, believed, widths
        )
        self.offline = self.new_stats().offline
        self.damage = DamageModel(table, self.config, self._trace())

    def new_stats(self) -> RoutingStats:
        """Routing statistics that have seen nothing but the trace."""
        geometry, config = self._geometry, self.config
        return RoutingStats(
            len(geometry.layers),
            geometry.experts,
            config.routing_window,
            config.routing_prior,
            self._trace(),
        )

    def _trace(self) -> Floats:
        """Router weight [L, E] of the calibration text."""
        return np.asarray(np.nansum(self._tables.table("routing").arrays["mass"], axis=0))

    def state(self, mass: Floats | None = None, eta: Floats | None = None) -> PlannerState:
        """All blocks at their widest, with mass [L, E] and eta [L, E, M] of the moment."""
        top = np.full(self._geometry.blocks, self._widths[-1])
        return self.damage.state(top, top, self.offline if mass is None else mass, eta)

    def bits(
        self, budget_bytes: int, mass: Floats | None = None, eta: Floats | None = None
    ) -> Bits:
        """The best widths for a number of bytes; floors of hot experts yield if they must."""
        state = self.state(mass, eta)
        for floors in (state.floors, np.full_like(state.floors, self._widths[0])):
            try:
                return self._allocate(replace(state, floors=floors), budget_bytes)
            except BudgetError:
                continue
        raise BudgetError(f"{budget_bytes:,} bytes do not hold the narrowest widths")

    def _allocate(self, state: PlannerState, budget_bytes: int) -> Bits:
        if self.config.planner == "hull":
            return allocate(state, budget_bytes)
        while state.total_bytes > budget_bytes:  # a block moves once in a greedy plan
            down = plan(state, state.total_bytes - budget_bytes, method=self.config.planner)
            if not down.moves:
                raise BudgetError(f"{budget_bytes:,} bytes are out of reach of the greedy plan")
            state = replace(state, bits=down.apply(state.bits))
        return state.bits
