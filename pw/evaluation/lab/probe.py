"""What the engine would know of prompts: their routing, and eta of each block by both residuals.

Axes: L MoE layers, E experts, M modules (gate_up, down).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pw.engine.precision.statistics import ExactStatistics, LearnedStatistics, PromptStatistics
from pw.evaluation.lab.model import LabModel
from pw.models.dense import ExpertCall, ExpertObserver
from pw.planning.residual import ExactResidual, ResidualHeads
from pw.store.artifact import Artifact

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Prompt:
    """One prompt as its prefill shows it."""

    tokens: int
    mass: Floats  # [L, E] sums of router weight r
    squares: Floats  # [L, E] sums of r^2
    learned: Floats | None  # [L, E, M] eta of the linear heads
    exact: Floats  # [L, E, M] eta from the prompt's own moments


class Prober:
    """Reads prompts with the unquantized model.

    Args:
        model: Runs them.
        tables: Artifact whose residual heads, energies and moments count.
        clamp: |log eta| at most.
    """

    def __init__(self, model: LabModel, tables: Artifact, clamp: float) -> None:
        self._model = model
        moments, energies = tables.table("moments").arrays, tables.table("sensitivity").arrays
        self._exact = ExactResidual(
            (energies["energy_gate_up"], energies["energy_down"]),
            (moments["gate_up"], moments["down"]),
            clamp,
        )
        self._heads = None
        if tables.has_table("residuals"):
            self._heads = ResidualHeads.from_table(tables.table("residuals"), clamp)

    @torch.no_grad()
    def read(self, ids: Tensor) -> Prompt:
        """Observe one prompt [S]."""
        model, geometry = self._model, self._model.geometry
        exact = ExactStatistics(self._exact, geometry, model.device)
        learned = None
        if self._heads is not None:
            learned = LearnedStatistics(self._heads, geometry, model.device)
        shape = (len(geometry.layers), geometry.experts)
        watcher = _Watcher([s for s in (exact, learned) if s is not None], shape)
        model.hold(model.unquantized())
        with model.watched(watcher):
            model.logits(ids, len(ids) - 2)
        return Prompt(
            len(ids),
            watcher.mass,
            watcher.squares,
            None if learned is None else learned.eta(),
            exact.eta(),
        )


class _Watcher(ExpertObserver):
    """Feeds the engine's own statistics."""

    def __init__(self, statistics: list[PromptStatistics], shape: tuple[int, int]) -> None:
        self._statistics = statistics
        self.mass, self.squares = np.zeros(shape), np.zeros(shape)

    def routed(self, slot: int, inputs: Tensor, ids: Tensor, weights: Tensor) -> None:
        """Hidden states of a layer, and who gets which weight."""
        for statistics in self._statistics:
            statistics.add_hidden(slot, inputs)
        experts, count = ids.flatten().cpu().numpy(), self.mass.shape[1]
        share = weights.flatten().double().cpu().numpy()
        self.mass[slot] += np.bincount(experts, share, minlength=count)
        self.squares[slot] += np.bincount(experts, share**2, minlength=count)

    def expert(self, call: ExpertCall) -> None:
        """Inputs of both blocks."""
        for statistics in self._statistics:
            statistics.add_moments(call.slot, call.expert, call.inputs, call.hidden)
