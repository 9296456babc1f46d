"""Second moments of the inputs of every block, with all their cross terms: H of the refit.

    H = SUM over the tokens of a block of r^2 x x^T

r is the router's weight: a token's error reaches the layer's output times r. One layer at a time:
K^2 numbers for every expert are a gigabyte in a large model.

Axes: E experts, K inputs of a block, n tokens.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from pw.blocks import MODULES, ExpertGeometry, Module
from pw.models.dense import ExpertCall, ExpertObserver
from pw_pipelines.ranks import Ranks

_PRIOR_TOKENS = 256.0  # what the layer at large counts beside an expert's own tokens


class HessianSums(ExpertObserver):
    """Sums of one layer after another; `take` gives a layer's and forgets it.

    Args:
        geometry: Of the experts.
        device: Where the sums are.
        wanted: Slots of the layers that will be asked for.
    """

    def __init__(
        self, geometry: ExpertGeometry, device: torch.device, wanted: Collection[int]
    ) -> None:
        self._geometry, self._device, self._wanted = geometry, device, wanted
        self._sums: dict[Module, Tensor] = {}  # [E, K, K] float32
        self._tokens = torch.zeros(geometry.experts, dtype=torch.int64)
        self._slot: int | None = None

    def expert(self, call: ExpertCall) -> None:
        """Add an expert's tokens."""
        if call.slot not in self._wanted:
            return
        self._open(call.slot)
        self._tokens[call.expert] += call.tokens.numel()
        for module, inputs in zip(MODULES, (call.inputs, call.hidden), strict=True):
            self._sums[module][call.expert] += moment(inputs, call.weights)

    def add_up(self, slot: int, ranks: Ranks) -> None:
        """Make the sums of a layer those of all ranks."""
        self._open(slot)
        for sums in self._sums.values():
            ranks.add_up(sums.unbind())  # one at a time: all ranks' parts meet in host memory
        ranks.add_up([self._tokens])

    def take(self, slot: int) -> dict[Module, Tensor]:
        """Hessians [E, K, K] of a layer, fit for use with few tokens or none."""
        self._open(slot)
        for module in MODULES:
            blend(self._sums[module], self._tokens, module)
        found, self._sums, self._slot = self._sums, {}, None
        return found

    def _open(self, slot: int) -> None:
        """Start with zeros where this layer has no sums yet."""
        if slot == self._slot:
            return
        self._slot = slot
        self._tokens.zero_()
        for module in MODULES:
            cols = self._geometry.shape(module).cols
            shape = (self._geometry.experts, cols, cols)
            self._sums[module] = torch.zeros(shape, device=self._device)


def moment(inputs: Tensor, weights: Tensor) -> Tensor:
    """SUM r^2 x x^T [K, K] of inputs [n, K] and router weights [n]; tokens that are not finite do
    not count.
    """
    scaled = inputs * weights[:, None]
    finite = torch.isfinite(scaled).all(1, keepdim=True)
    scaled = torch.where(finite, scaled, 0.0)
    return scaled.T @ scaled


def blend(sums: Tensor, tokens: Tensor, module: Module) -> None:
    """Turn sums [E, K, K] into Hessians with a mean diagonal of 1, in place; tokens [E] are counts.

    Few tokens do not span K inputs. Where all experts of a layer share their inputs (gate_up) the
    rest comes from the layer; inner units of different experts have nothing in common, so there
    (down) cross terms are shrunk. An expert without tokens has the layer's H, or the identity.
    """
    layer = sums.sum(0, keepdim=True)
    _scale(sums)
    count = tokens.to(sums.device, torch.float32)[:, None, None]
    own = count / (count + _PRIOR_TOKENS)
    if module == "gate_up":
        _scale(layer)
        sums.mul_(own).addcmul_(layer, 1 - own)
    else:
        diagonal = sums.diagonal(dim1=1, dim2=2)
        kept = diagonal.clone()
        sums.mul_(own)
        diagonal.copy_(kept)


def _scale(sums: Tensor) -> None:
    """Divide by the mean of the diagonal, in place; the identity where that is 0."""
    diagonal = sums.diagonal(dim1=1, dim2=2)
    scale = diagonal.mean(1)[:, None, None]
    sums.div_(scale.where(scale > 0, 1.0))
    diagonal.add_((scale[:, 0] <= 0).float())
