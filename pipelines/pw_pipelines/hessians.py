"""Second moments of the inputs of every block, with all their cross terms: H of the refit.

    H = SUM over the tokens of a block of r^2 x x^T

r is the router's weight: a token's error reaches the layer's output times r. One layer at a time:
K^2 numbers for every expert are a gigabyte in a large model.

Axes: E experts, K inputs of a block, n tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from pw.blocks import MODULES, ExpertGeometry, Module
from pw.models.dense import ExpertCall, ExpertObserver
from pw_pipelines.observation import ObservedModel, batches, part_of
from pw_pipelines.progress import Advance
from pw_pipelines.ranks import ALONE, Ranks

_PRIOR_TOKENS = 256.0  # what the layer at large counts beside an expert's own tokens


Give = Callable[[int, dict[Module, Tensor]], None]


def read_hessians(
    model: ObservedModel,
    windows: Tensor,
    wanted: Collection[int],
    give: Give,
    advance: Advance = lambda _: None,
    ranks: Ranks = ALONE,
) -> None:
    """Read windows [P, S] once and hand over the Hessians of each wanted layer when it has been
    read: `give(layer, {module: [E, K, K]})`.

    Args:
        model: Reads them.
        windows: Tokens, of all ranks together.
        wanted: MoE layers, by the model's own index.
        give: Called in the order of the layers; the next layer waits.
        advance: Called with the number of windows each time a layer has read some.
        ranks: Each reads a part of the text, and is given the sums of all.
    """
    geometry = model.geometry
    sums = HessianSums(geometry, model.device, {geometry.slot(layer) for layer in wanted})
    own = part_of(windows, ranks)

    def after(layer: int) -> None:
        if layer in wanted:
            sums.add_up(geometry.slot(layer), ranks)
            give(layer, sums.take(geometry.slot(layer)))

    model.read(own, [sums] * len(list(batches(own))), advance=advance, after_layer=after)


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
        if ranks.size == 1:
            return
        for tensor in (*self._sums.values(), self._tokens):
            host = tensor.cpu()
            ranks.add_up([host])
            tensor.copy_(host)

    def take(self, slot: int) -> dict[Module, Tensor]:
        """Hessians [E, K, K] of a layer, fit for use with few tokens or none."""
        self._open(slot)
        found = {m: blended(self._sums[m], self._tokens, m) for m in MODULES}
        self._sums, self._slot = {}, None
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


def blended(sums: Tensor, tokens: Tensor, module: Module) -> Tensor:
    """[E, K, K] with a mean diagonal of 1 from sums [E, K, K] and counts [E].

    Few tokens do not span K inputs. Where all experts of a layer share their inputs (gate_up) the
    rest comes from the layer; inner units of different experts have nothing in common, so there
    (down) cross terms are shrunk. An expert without tokens has the layer's H, or the identity.
    """
    eye = torch.eye(sums.shape[1], device=sums.device)
    own = _unit(sums, eye)
    if module == "gate_up":
        prior = _unit(sums.sum(0, keepdim=True), eye)
    else:
        prior = torch.diag_embed(own.diagonal(dim1=1, dim2=2))
    count = tokens.to(sums.device, torch.float32)[:, None, None]
    return (count * own + _PRIOR_TOKENS * prior) / (count + _PRIOR_TOKENS)


def _unit(sums: Tensor, eye: Tensor) -> Tensor:
    """Divided by the mean of the diagonal; `eye` where that is 0."""
    scale = sums.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    return torch.where(scale > 0, sums / scale.where(scale > 0, 1.0), eye)
