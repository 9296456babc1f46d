"""Second moments of the inputs of every block: the weights of the codebook fit and of `hessian`.

Also says how well the calibration text covers the experts, and what is put in place of moments
that were not measured. Axes: L MoE layers, E experts, H hidden, I inner, K inputs of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pw.blocks import MODULES, BlockKey, ExpertGeometry, Module
from pw.errors import ConfigError, ModelError
from pw.models.dense import ExpertCall, ExpertObserver
from pw_pipelines.hessians import HessianSums
from pw_pipelines.observation import CPU, ObservedModel, adding_up, batches, part_of
from pw_pipelines.progress import Advance, Progress
from pw_pipelines.ranks import ALONE, Ranks
from pw_pipelines.savepoint import Savepoint

THIN_TOKENS = 64  # fewer routed tokens than this are not trusted alone
NON_FINITE_LIMIT = 0.1  # share of a layer's, or of a block's own, rows that may be dropped
_DEAD_WARNING, _THIN_WARNING = 0.05, 0.20  # shares of experts that call for a warning


class Coverage(IntEnum):
    """How many calibration tokens an expert saw."""

    DEAD = 0  # none
    THIN = 1  # fewer than THIN_TOKENS
    OK = 2


class MomentSums(ExpertObserver):
    """Sums of squared inputs per block, token counts and router mass per expert, in float64.

    They are where the model is: nothing waits for a GPU.
    """

    def __init__(self, geometry: ExpertGeometry, device: torch.device = CPU) -> None:
        self.geometry = geometry
        shape = (len(geometry.layers), geometry.experts)
        real: dict[str, Any] = {"dtype": torch.float64, "device": device}
        whole: dict[str, Any] = {"dtype": torch.int64, "device": device}
        self.squares: dict[Module, Tensor] = {
            m: torch.zeros((*shape, geometry.shape(m).cols), **real) for m in MODULES
        }
        self.rows = torch.zeros((*shape, len(MODULES)), **whole)  # finite ones
        self.dropped = torch.zeros_like(self.rows)
        self.lost = torch.zeros(shape[:1], **whole)  # tokens whose states were not finite
        self.tokens = torch.zeros(shape, **whole)
        self.mass = torch.zeros(shape, **real)

    def routed(self, slot: int, inputs: Tensor, ids: Tensor, weights: Tensor) -> None:
        """Count routed tokens and router weight; tokens that are not finite do not count."""
        finite = torch.isfinite(inputs).all(1, keepdim=True)
        flat = ids.flatten()
        self.lost[slot] += inputs.shape[0] - finite.sum()
        self.tokens[slot].index_add_(0, flat, finite.expand(ids.shape).flatten().long())
        self.mass[slot].index_add_(0, flat, torch.where(finite, weights, 0.0).flatten().double())

    def expert(self, call: ExpertCall) -> None:
        """Add up the squared inputs of both blocks."""
        self._add(call.slot, call.expert, "gate_up", call.inputs)
        self._add(call.slot, call.expert, "down", call.hidden)

    def state(self) -> dict[str, Tensor]:
        """All sums."""
        squares = {f"squares.{module}": self.squares[module] for module in MODULES}
        names = ("rows", "dropped", "lost", "tokens", "mass")
        return squares | {name: getattr(self, name) for name in names}

    def _add(self, slot: int, expert: int, module: Module, inputs: Tensor) -> None:
        """Rows of inputs [n, K] that are not finite are dropped and counted."""
        finite = torch.isfinite(inputs).all(1, keepdim=True)
        index, count = MODULES.index(module), finite.sum()
        if inputs.device.type != "cpu" or count < inputs.shape[0]:  # no GPU waits for the answer
            inputs = torch.where(finite, inputs, 0.0)
        self.squares[module][slot, expert] += inputs.square().sum(0)
        self.rows[slot, expert, index] += count
        self.dropped[slot, expert, index] += inputs.shape[0] - count

    def of_layer(self, layer: int) -> MomentSums:
        """The sums of one layer, on the CPU."""
        one = MomentSums(replace(self.geometry, layers=(layer,)))
        slot = self.geometry.slot(layer)
        for name, tensor in self.state().items():
            one.state()[name].copy_(tensor[slot, None])
        return one


class LayerSums(ExpertObserver):
    """All that the fit of a layer needs, from one reading of the text.

    Args:
        geometry: Of the experts.
        device: Where the sums are.
        wanted: Slots of the layers whose Hessians will be asked for.
    """

    def __init__(
        self, geometry: ExpertGeometry, device: torch.device, wanted: Collection[int]
    ) -> None:
        self.moments = MomentSums(geometry, device)
        self.hessians = HessianSums(geometry, device, wanted)
        self.routed = self.moments.routed  # type: ignore[method-assign]
        self.state = self.moments.state  # type: ignore[method-assign]

    def expert(self, call: ExpertCall) -> None:
        """Take in an expert's tokens."""
        self.moments.expert(call)
        self.hessians.expert(call)


@dataclass(frozen=True)
class Moments:
    """Mean squared inputs that the fit uses, and what they rest on."""

    gate_up: NDArray[np.float32]  # [L, E, H]
    down: NDArray[np.float32]  # [L, E, I]
    tokens: NDArray[np.int64]  # [L, E]
    mass: NDArray[np.float32]  # [L, E], share of the layer's router weight
    coverage: NDArray[np.uint8]  # [L, E], values of Coverage
    dropped: int = 0  # tokens x layers left out because their states were not finite

    def of(self, module: Module) -> NDArray[np.float32]:
        """[L, E, K] of one module."""
        return self.gate_up if module == "gate_up" else self.down

    def layer(self, slot: int) -> Moments:
        """Those of one layer, L = 1."""
        one = {name: array[slot : slot + 1] for name, array in self.arrays().items()}
        return Moments.from_arrays(one)

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """The table `moments` of an artifact."""
        return {
            "gate_up": self.gate_up,
            "down": self.down,
            "tokens": self.tokens,
            "mass": self.mass,
            "coverage": self.coverage,
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[np.generic]]) -> Moments:
        """Inverse of `arrays`."""
        return cls(
            gate_up=np.asarray(arrays["gate_up"]),
            down=np.asarray(arrays["down"]),
            tokens=np.asarray(arrays["tokens"]),
            mass=np.asarray(arrays["mass"]),
            coverage=np.asarray(arrays["coverage"]),
        )

    def counts(self) -> dict[str, int]:
        """Number of experts of each kind of coverage."""
        return {c.name.lower(): int((self.coverage == c).sum()) for c in Coverage}


Give = Callable[[int, Moments, Mapping[Module, Tensor]], None]


def measure_moments(
    model: ObservedModel,
    windows: Tensor,
    give: Give = lambda *_: None,
    *,
    hessians: Collection[int] = (),
    advance: Advance = lambda _: None,
    savepoint: Savepoint | None = None,
    ranks: Ranks = ALONE,
) -> Moments:
    """Run the model over windows [P, S] once and measure all blocks; goes on from `savepoint`.

    Several ranks read a part each and add up; all of them get the result.

    Args:
        model: Reads.
        windows: Tokens, of all ranks together.
        give: Called when a layer has been read, with its number, its moments (L = 1) and its
            Hessians {module: [E, K, K]}; the next layer waits, and is not begun before it returns.
        hessians: Layers, by the model's own index, whose Hessians are wanted.
        advance: Called with the number of windows each time a layer has read some.
        savepoint: Where a reading that needs a file is saved after every layer.
        ranks: Who shares the work.

    Raises:
        ConfigError: In some layer no expert saw enough tokens.
        ModelError: Too many rows of a block's input are not finite.
    """
    geometry = model.geometry
    sums = LayerSums(geometry, model.device, {geometry.slot(layer) for layer in hessians})
    own = part_of(windows, ranks, model.device)
    add_up = adding_up(sums, geometry, ranks)

    def after(layer: int) -> None:
        if layer not in geometry.layers:
            return
        add_up(layer)
        moments, found = finish_moments(sums.moments.of_layer(layer)), {}
        if layer in hessians:
            sums.hessians.add_up(geometry.slot(layer), ranks)
            found = sums.hessians.take(geometry.slot(layer))
        give(layer, moments, found)

    model.read(
        own,
        [sums] * len(list(batches(own, model.device))),
        advance=advance,
        savepoint=savepoint,
        after_layer=after,
    )
    return joined([finish_moments(sums.moments.of_layer(layer)) for layer in geometry.layers])


def joined(layers: Sequence[Moments]) -> Moments:
    """Moments of several layers as one."""
    tables = [one.arrays() for one in layers]
    arrays = {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}
    return replace(Moments.from_arrays(arrays), dropped=sum(one.dropped for one in layers))


def finish_moments(sums: MomentSums) -> Moments:
    """Means from sums, with the rules for experts that saw few tokens or none (see `_fill`).

    Raises:
        ConfigError: In some layer no expert saw enough tokens.
        ModelError: Too many rows of a block's input are not finite.
    """
    _check_finite(sums)
    rows = sums.rows.min(2).values
    coverage = torch.where(rows >= THIN_TOKENS, Coverage.OK, Coverage.THIN)
    coverage[rows == 0] = Coverage.DEAD
    for slot, layer in enumerate(sums.geometry.layers):
        if not (coverage[slot] == Coverage.OK).any():
            raise ConfigError(
                f"calibration set is too small: in layer {layer} no expert saw {THIN_TOKENS} "
                f"tokens, the busiest saw {int(rows[slot].max())}",
                "give more or other text: --nsamples, --seqlen, --dataset",
            )
    means = {
        m: _fill(sums.squares[m], sums.rows[:, :, i], per_column=m == "gate_up")
        for i, m in enumerate(MODULES)
    }
    mass = sums.mass / sums.mass.sum(1, keepdim=True)
    return Moments(
        gate_up=means["gate_up"].float().numpy(),
        down=means["down"].float().numpy(),
        tokens=sums.tokens.numpy(),
        mass=mass.float().numpy(),
        coverage=coverage.to(torch.uint8).numpy(),
        dropped=int(sums.lost.sum()),
    )


def _check_finite(sums: MomentSums) -> None:
    """Refuse a layer that too many tokens reach as non-finite, or a block that makes too many."""
    hint = "the checkpoint is damaged, or its activations overflow the dtype"
    limit = f"limit {NON_FINITE_LIMIT:.0%}"
    gate_up, down = sums.dropped.unbind(2)  # [L, E] each
    seen = gate_up + sums.rows[:, :, MODULES.index("gate_up")]
    for slot, layer in enumerate(sums.geometry.layers):
        lost, rows = int(gate_up[slot].sum()), int(seen[slot].sum())
        if lost > NON_FINITE_LIMIT * rows:
            raise ModelError(
                f"inputs of the experts of layer {layer} are not finite in {lost} of {rows} rows, "
                f"{limit}",
                hint,
            )
        lost_inside, rows_inside = down[slot] - gate_up[slot], seen[slot] - gate_up[slot]
        worst = (lost_inside > NON_FINITE_LIMIT * rows_inside).nonzero()
        if len(worst):
            expert = int(worst[0])
            raise ModelError(
                f"inputs of {BlockKey(layer, expert, 'down')} are not finite in "
                f"{int(lost_inside[expert])} of {int(rows_inside[expert])} rows, {limit}",
                hint,
            )


def _fill(squares: Tensor, rows: Tensor, *, per_column: bool) -> Tensor:
    """Mean squares [L, E, K] from sums [L, E, K] and row counts [L, E].

    A thin expert is shrunk toward the layer's mean: column by column where all experts of a layer
    share their inputs (gate_up), else toward one flat value (inner units of different experts have
    nothing in common). A dead one gets equal weights, scaled by the layer's median.
    """
    count = rows[:, :, None]
    mean = squares / count.clamp_min(1)
    total = squares.sum(1, keepdim=True) / count.sum(1, keepdim=True).clamp_min(1)
    prior = total if per_column else total.mean(2, keepdim=True)
    shrunk = (squares + THIN_TOKENS * prior) / (count + THIN_TOKENS)
    scale = mean.mean(2).masked_fill(rows == 0, torch.nan).nanmedian(1).values
    filled = torch.where(count < THIN_TOKENS, shrunk, mean)
    return torch.where(count == 0, scale[:, None, None], filled)


def report_coverage(
    moments: Moments, progress: Progress, *, strict: bool, layer: int | None = None
) -> None:
    """Warn of experts that the calibration text hardly reaches; `layer` if they are those of one.

    Raises:
        ConfigError: `strict`, and some expert saw too few tokens.
    """
    counts, experts = moments.counts(), moments.coverage.size
    where = "" if layer is None else f"layer {layer}: "
    summary = (
        f"{where}of {experts} experts {counts['dead']} saw no calibration token and "
        f"{counts['thin']} fewer than {THIN_TOKENS}"
    )
    hint = "give more or other text: --nsamples, --dataset"
    if strict and counts["dead"] + counts["thin"]:
        raise ConfigError(summary, hint)
    if counts["dead"] > _DEAD_WARNING * experts or counts["thin"] > _THIN_WARNING * experts:
        progress.warn(f"{summary} ({hint})")
    else:
        progress.detail(summary)
    if moments.dropped:
        progress.warn(
            f"{moments.dropped} states of tokens, all layers together, were not finite and left out"
        )
