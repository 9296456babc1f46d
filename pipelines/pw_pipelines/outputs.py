"""Second moments of the loss's gradients where experts add to the hidden state: G of the refit.

    G = mean over tokens of g g^T,  g the gradient at the output of a layer's experts

All experts of a layer write into the same hidden state, so one matrix serves their `down` blocks.
What an error of a block costs is near tr(G dW H dW^T) (K-FAC, arXiv 1503.05671; YAQA,
arXiv 2505.22988): errors of different rows cancel where the loss sees their sum alone.

Axes: L MoE layers, N hidden, n tokens of an expert, P windows, S tokens of a window.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pw.blocks import ExpertGeometry
from pw.models.dense import ExpertCall, ExpertObserver
from pw_pipelines.observation import ObservedModel
from pw_pipelines.progress import Progress

WINDOWS = 32  # of the calibration text that are read; N^2 numbers need no more
_DAMPING = 0.05  # of the mean of diag G, added to it


class OutputSums(ExpertObserver):
    """Sums of g g^T of every MoE layer.

    Args:
        geometry: Of the experts.
        device: Where the sums are: that of the model.
    """

    def __init__(self, geometry: ExpertGeometry, device: torch.device) -> None:
        rows = geometry.shape("down").rows
        self.sums = torch.zeros(len(geometry.layers), rows, rows, device=device)

    def expert(self, call: ExpertCall) -> None:
        """Wait for the gradient [n, N]; tokens that are not finite do not count."""
        sums = self.sums[call.slot]

        def take_in(gradient: Tensor) -> None:
            finite = torch.isfinite(gradient).all(1, keepdim=True)
            gradient = torch.where(finite, gradient, 0.0).float()
            sums.addmm_(gradient.T, gradient)

        call.output.register_hook(take_in)  # type: ignore[no-untyped-call]


def measure_outputs(model: ObservedModel, windows: Tensor, progress: Progress) -> Tensor:
    """G [L, N, N] float32 of the first of the windows [P, S], with a mean diagonal of 1, damped.

    A layer without gradients gets the identity.
    """
    sums = OutputSums(model.geometry, model.device)
    some = windows[:WINDOWS]
    with progress.stage("gradients", model.backward_units(len(some)), "samples x layers") as step:
        model.backward(some, sums, step)
    eye = torch.eye(sums.sums.shape[1], device=model.device)
    scale = sums.sums.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    return torch.where(scale > 0, sums.sums / scale.where(scale > 0, 1.0), eye) + _DAMPING * eye
