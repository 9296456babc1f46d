"""What the planner learns from a prompt while it is prefilled: eta of each block.

One object per sequence, fed chunk by chunk. Which numbers it collects depends on the mode: norms
and mean of the hidden states for the learned heads, second moments of the blocks' inputs for the
exact score.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pw.blocks import ExpertGeometry
from pw.models.features import FeatureSums
from pw.planning.residual import ExactResidual, ResidualHeads


class PromptStatistics(Protocol):
    """Statistics of one prompt."""

    wants_moments: bool

    def add_hidden(self, slot: int, hidden: Tensor) -> None:
        """Take in the experts' input [n, H] of prompt tokens at one MoE layer."""

    def add_moments(self, slot: int, expert: int, inputs: Tensor, hidden: Tensor) -> None:
        """Take in the inputs of gate_up [n, H] and down [n, I] of tokens routed to an expert."""

    def eta(self) -> NDArray[np.float64]:
        """Prompt residual [L, E, 2] of the tokens so far."""


def statistics_bytes(mode: str, geometry: ExpertGeometry) -> int:
    """Device bytes of one prompt's statistics for a residual that is settled, not auto."""
    layers, hidden = len(geometry.layers), geometry.gate_up.cols
    if mode == "learned":
        return layers * 8 * (2 * hidden + 3)
    if mode == "exact":
        return layers * geometry.experts * 4 * (hidden + geometry.down.cols)
    return 0


class LearnedStatistics:
    """Features for `ResidualHeads`."""

    wants_moments = False

    def __init__(
        self, heads: ResidualHeads, geometry: ExpertGeometry, device: torch.device
    ) -> None:
        self._heads = heads
        self._sums = FeatureSums(len(geometry.layers), geometry.gate_up.cols, device)

    def add_hidden(self, slot: int, hidden: Tensor) -> None:
        """See `PromptStatistics`."""
        self._sums.add(slot, hidden)

    def add_moments(self, slot: int, expert: int, inputs: Tensor, hidden: Tensor) -> None:
        """Not used by the heads."""

    def eta(self) -> NDArray[np.float64]:
        """See `PromptStatistics`."""
        return self._heads.predict(self._sums.features().cpu().numpy())


class ExactStatistics:
    """Second moments for `ExactResidual`."""

    wants_moments = True

    def __init__(
        self, residual: ExactResidual, geometry: ExpertGeometry, device: torch.device
    ) -> None:
        self._residual = residual
        lead = (len(geometry.layers), geometry.experts)
        self._inputs = torch.zeros(*lead, geometry.gate_up.cols, device=device)
        self._hidden = torch.zeros(*lead, geometry.down.cols, device=device)
        self._tokens = np.zeros(lead)

    def add_hidden(self, slot: int, hidden: Tensor) -> None:
        """Not used by the exact score."""

    def add_moments(self, slot: int, expert: int, inputs: Tensor, hidden: Tensor) -> None:
        """See `PromptStatistics`."""
        self._inputs[slot, expert] += inputs.float().square().sum(0)
        self._hidden[slot, expert] += hidden.float().square().sum(0)
        self._tokens[slot, expert] += len(inputs)

    def eta(self) -> NDArray[np.float64]:
        """See `PromptStatistics`."""
        count = np.maximum(self._tokens, 1.0)[..., None]
        moments = (self._inputs.cpu().numpy() / count, self._hidden.cpu().numpy() / count)
        return self._residual.eta(moments, self._tokens)
