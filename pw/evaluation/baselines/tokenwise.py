"""DP-LLM: each token chooses between two widths of every block (ALGORITHMS section 3).

Memory is that of the wider one, always: what the rule saves is bandwidth. For a block with widths
low and high, dW = W_high - W_low; a token takes the wider where an estimate of |dW x| is above a
threshold, the quantile of |dW x| on calibration text that gives the wanted share of low tokens.
The estimate is affine in |x| where that explains 90 % of the variance, else a Gaussian sketch
of dW with 64 rows. Not reproduced: the trained shares (every block gets the same) and the
fine-tuned sketch.

Axes: n tokens, N rows, K columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import linear

from pw.blocks import MODULES, BlockKey, Module
from pw.evaluation.lab.model import LabModel
from pw.models.dense import ExpertCall, ExpertObserver, TorchExperts

Ints = NDArray[np.int64]

_LEAST_R2 = 0.9
_SKETCH_ROWS = 64
_LEAST_TOKENS = 32  # of a fit; a block that saw fewer takes the wider width always


@dataclass(frozen=True)
class Chooser:
    """How the tokens of one block choose."""

    low: Tensor  # [N, K]
    threshold: float  # the wider width above it
    slope: float  # of the affine estimate
    offset: float
    sketch: Tensor | None  # [64, K]; None: affine

    def wide(self, x: Tensor) -> Tensor:
        """Which tokens [n] of x [n, K] take the wider width."""
        if self.sketch is None:
            estimate = self.slope * torch.linalg.vector_norm(x, dim=1) + self.offset
        else:
            estimate = torch.linalg.vector_norm(linear(x, self.sketch), dim=1)
        return torch.gt(estimate, self.threshold)


class _Norms(ExpertObserver):
    """|x|, |dW x| and |G x| of every calibration token of every block."""

    def __init__(self, model: LabModel, errors: list[Tensor], sketches: list[Tensor]) -> None:
        self._geometry, self._errors, self._sketches = model.geometry, errors, sketches
        self.found: list[list[Tensor]] = [[] for _ in errors]  # each [3, n]

    def expert(self, call: ExpertCall) -> None:
        """Take in the tokens of both blocks."""
        for module, x in zip(MODULES, (call.inputs, call.hidden), strict=True):
            key = BlockKey(self._geometry.layers[call.slot], call.expert, module)
            index = self._geometry.index(key)
            outputs = (x, linear(x, self._errors[index]), linear(x, self._sketches[index]))
            norms = [torch.linalg.vector_norm(y, dim=1) for y in outputs]
            self.found[index].append(torch.stack(norms))


class TokenwiseExperts(TorchExperts):
    """Experts whose tokens choose; the model holds the wider widths.

    Attributes:
        tokens: Block inputs seen, and those of them that took the wider width.
    """

    def __init__(self, model: LabModel, choosers: list[Chooser]) -> None:
        plain = model.experts
        super().__init__(plain.weight, plain.bias, plain.activations)
        self._geometry, self._choosers = model.geometry, choosers
        self.tokens = np.zeros(2, dtype=np.int64)

    def linear(self, slot: int, expert: int, module: Module, x: Tensor) -> Tensor:
        """Each row at its own width."""
        wide = super().linear(slot, expert, module, x)
        key = BlockKey(self._geometry.layers[slot], expert, module)
        chooser = self._choosers[self._geometry.index(key)]
        chosen = chooser.wide(x)
        self.tokens += (len(x), int(chosen.sum()))
        return torch.where(chosen[:, None], wide, linear(x, chooser.low))


def fit_choosers(
    model: LabModel, low: Ints, high: Ints, share_low: float, windows: Iterable[Tensor]
) -> list[Chooser]:
    """Fit the estimate and the threshold of every block.

    Args:
        model: Gives the weights, and runs the calibration text unquantized.
        low: [n] widths of the tokens that matter less.
        high: [n] widths that are resident.
        share_low: Share of tokens that shall take the narrower width.
        windows: Calibration text, token ids [S] each.
    """
    generator = torch.Generator().manual_seed(0)
    lows = [model.weight(i, int(b)) for i, b in enumerate(low)]
    errors = [model.weight(i, int(b)) - lows[i] for i, b in enumerate(high)]
    sketches = []
    for error in errors:
        gaussian = torch.randn(_SKETCH_ROWS, len(error), generator=generator)
        sketches.append(gaussian.to(error.device) @ error / _SKETCH_ROWS**0.5)
    norms = _Norms(model, errors, sketches)
    model.hold(model.unquantized())
    with model.watched(norms), torch.no_grad():
        for ids in windows:
            model.logits(ids)
    return [
        _fit(low_weight, sketch, found, share_low)
        for low_weight, sketch, found in zip(lows, sketches, norms.found, strict=True)
    ]


def _fit(low: Tensor, sketch: Tensor, found: list[Tensor], share_low: float) -> Chooser:
    size, error, sketched = (
        torch.cat(found, 1).double().cpu().numpy() if found else np.zeros((3, 0))
    )
    if len(size) < _LEAST_TOKENS:
        return Chooser(low, -np.inf, 0.0, 0.0, None)
    slope, offset = np.polyfit(size, error, 1)
    residual = error - (slope * size + offset)
    spread = float(error.var())
    affine = spread == 0 or float(residual.var()) <= (1 - _LEAST_R2) * spread
    estimate = slope * size + offset if affine else sketched
    threshold = float(np.quantile(estimate, share_low))
    return Chooser(low, threshold, float(slope), float(offset), None if affine else sketch)


@contextmanager
def tokenwise(model: LabModel, choosers: list[Chooser]) -> Iterator[TokenwiseExperts]:
    """Let the tokens of a model choose; the widths that it holds are the wider ones."""
    plain, model.experts = model.experts, TokenwiseExperts(model, choosers)
    try:
        yield model.experts
    finally:
        model.experts = plain
