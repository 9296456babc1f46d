"""Offline scores of every block at every width, as the methods compared here define them.

One pass over calibration text with gradients. With g the loss gradient at a block's output, x its
input, dW its quantization error and r the router weight, summed over tokens (ALGORITHMS 1.3, 4, 5):

    token      (g . dW x)^2 / 2                 what `pw sensitivity` calls output_gradient
    gemq       SUM_n g_n^2 (dW x)_n^2 / 2       GEMQ's E[dz^T diag(g g^T) dz]
    fisher     SUM_nj g_n^2 x_j^2 dW_nj^2 / 2   element-wise Fisher
    hessian    SUM_nj x_j^2 dW_nj^2, a mean over the tokens routed to the block: the paper's
    output     |r (block output at the width - in full)| of the MoE layer, Frobenius: MxMoE's

Axes: L MoE layers, E experts, M modules (gate_up, down), W widths, n tokens, N rows, K columns.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from pw.blocks import MODULES, BlockKey, Module
from pw.evaluation.lab.model import UNQUANTIZED, LabModel
from pw.models.dense import ExpertCall, ExpertObserver, activate

Floats = NDArray[np.float64]
SCORES = ("token", "gemq", "fisher", "hessian", "output")


class _ScoreSums(ExpertObserver):
    """Adds up the scores of all blocks."""

    def __init__(self, model: LabModel) -> None:
        geometry = model.geometry
        self._model, self._geometry = model, geometry
        shape = (len(geometry.layers), geometry.experts, len(MODULES), len(model.widths))
        zeros = partial(torch.zeros, dtype=torch.float64, device=model.device)
        self.sums = {name: zeros(shape) for name in SCORES}
        self.mass, self.squares, self.tokens = (zeros(shape[:2]) for _ in range(3))
        self._errors: dict[tuple[int, int, int], Tensor] = {}

    def expert(self, call: ExpertCall) -> None:
        """Forward scores at once, the others when the gradients arrive."""
        self.mass[call.slot, call.expert] += call.weights.detach().double().sum()
        self.squares[call.slot, call.expert] += call.weights.detach().double().square().sum()
        self.tokens[call.slot, call.expert] += len(call.tokens)
        self._watch(call, "gate_up", call.inputs.detach(), call.gate_up)
        self._watch(call, "down", call.hidden.detach(), call.output)

    def _watch(self, call: ExpertCall, module: Module, x: Tensor, output: Tensor) -> None:
        place = (call.slot, call.expert, MODULES.index(module))
        errors = self._dw(place)  # [W, N, K]
        change = linear(x, errors.flatten(0, 1)).view(len(x), len(errors), -1)  # dW x [n, W, N]
        energy = errors.square() @ x.square().sum(0)  # [W, N]
        self.sums["hessian"][place] += energy.double().sum(1)
        self.sums["output"][place] += self._output_squares(call, module, output.detach(), change)

        def take_in(gradient: Tensor) -> None:  # [n, N]
            dots = torch.einsum("nwr,nr->nw", change, gradient)
            self.sums["token"][place] += dots.double().square().sum(0) / 2
            squares = torch.einsum("nwr,nr->w", change.square(), gradient.square())
            self.sums["gemq"][place] += squares.double() / 2
            element = gradient.square().T @ x.square()  # [N, K]
            self.sums["fisher"][place] += (errors.square() * element).sum((1, 2)).double() / 2

        output.register_hook(take_in)  # type: ignore[no-untyped-call]

    def _output_squares(
        self, call: ExpertCall, module: Module, output: Tensor, change: Tensor
    ) -> Tensor:
        """Squared change [W] of the layer's output when this block alone has each width."""
        weights = call.weights.detach()
        if module == "down":
            return (weights[:, None, None] * change).double().square().sum((0, 2))
        down = self._model.weight(self._index(call.slot, call.expert, "down"), UNQUANTIZED)
        usual, found = call.output.detach(), []
        for width in range(change.shape[1]):
            hidden = activate(output + change[:, width], self._model.activation(call.slot))
            moved = (linear(hidden, down) - usual) * weights[:, None]
            found.append(moved.double().square().sum())
        return torch.stack(found)

    def _dw(self, place: tuple[int, int, int]) -> Tensor:
        if place not in self._errors:
            index = self._index(place[0], place[1], MODULES[place[2]])
            exact = self._model.weight(index, UNQUANTIZED)
            widths = [self._model.weight(index, b) - exact for b in self._model.widths]
            self._errors[place] = torch.stack(widths)
        return self._errors[place]

    def _index(self, slot: int, expert: int, module: Module) -> int:
        return self._geometry.index(BlockKey(self._geometry.layers[slot], expert, module))


def measure_scores(model: LabModel, windows: Iterable[Tensor]) -> dict[str, Floats]:
    """All scores [L, E, M, W] on these windows, and of their routing `mass` (sums of r), `squares`
    (of r^2) and `tokens` [L, E].

    The gradient scores are means over all predicted tokens, nats per token.
    """
    sums, predicted = _ScoreSums(model), 0
    model.hold(model.unquantized())
    with model.watched(sums), torch.enable_grad():
        for ids in windows:
            loss = cross_entropy(model.logits(ids), ids[1:].to(model.device), reduction="sum")
            torch.autograd.backward(loss)
            predicted += len(ids) - 1
    routed = sums.tokens[..., None, None].clamp_min(1)
    found = {name: sums.sums[name] / predicted for name in ("token", "gemq", "fisher")}
    found["hessian"] = sums.sums["hessian"] / routed
    found["output"] = sums.sums["output"].sqrt()
    arrays = {name: values.cpu().numpy() for name, values in found.items()}
    routing = {name: getattr(sums, name).cpu().numpy() for name in ("mass", "squares", "tokens")}
    return arrays | routing
