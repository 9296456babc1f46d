"""What one rank holds of a model that several ranks share. Arithmetic; no processes.

    by slices   every rank has a part of every expert: rows of gate and up, columns of down
    by experts  every rank has whole experts, as many as every other

Either way all ranks have blocks of the same shapes, in the same number, so that one plan is a plan
for each of them: block i is as wide on every rank, in the same pages of every arena. By experts,
block i is another expert on each rank; those that share their width in this way are about equally
busy (`pw.engine.parallel.placing`), so that little is lost by planning for them together.

Axes: L MoE layers, E experts of the model, e experts of a rank, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pw.blocks import MODULES, BlockKey, BlockShape, ExpertGeometry, Module
from pw.errors import ConfigError
from pw.models.slicing import sizes_that_divide
from pw.planning.planner import PlannerState
from pw_kernels.slicing import BlockPart

Biases = tuple[tuple[Tensor | None, Tensor | None], ...]
DenseExperts = list[tuple[Tensor, Tensor]]


def check_even(geometry: ExpertGeometry, size: int, *, by_expert: bool) -> None:
    """Refuse what cannot be shared evenly.

    Raises:
        ConfigError: With the numbers.
    """
    inner, experts = geometry.down.cols, geometry.experts
    if by_expert:
        count, what, other, change = experts, "routed experts", inner, "leave {} out"
    else:
        count, what, other, change = inner, "inner columns of each expert", experts, "give {}"
    if count % size:
        hint = sizes_that_divide(count)
        if other % size == 0:
            hint += ", or " + change.format("--enable-expert-parallel")
        raise ConfigError(f"{count} {what} cannot be shared evenly by {size} ranks", hint)


@dataclass(frozen=True, eq=False)
class Share:
    """The part of one rank.

    Args:
        whole: Blocks of the model.
        rank: This one, from 0.
        size: R.
        placed: [L, e, R] experts of the model, by experts; None: by slices.
    """

    whole: ExpertGeometry
    rank: int
    size: int
    placed: NDArray[np.int64] | None = None

    @cached_property
    def geometry(self) -> ExpertGeometry:
        """The blocks of this rank; layers keep their numbers."""
        if self.placed is not None:
            return replace(self.whole, experts=self.placed.shape[1])
        gate_up, down = (BlockShape(*self.part(module).shape) for module in MODULES)
        return replace(self.whole, gate_up=gate_up, down=down)

    def key(self, key: BlockKey) -> BlockKey:
        """The block of the model that a block of this rank is, or is a part of."""
        if self.placed is None:
            return key
        slot = self.whole.slot(key.layer)
        return replace(key, expert=int(self.placed[slot, key.expert, self.rank]))

    def part(self, module: Module) -> BlockPart:
        """What this rank keeps of each of its blocks."""
        shape, inner = self.whole.shape(module), self.whole.down.cols
        rows: tuple[range, ...] = (range(shape.rows),)
        cols = range(shape.cols)
        if self.placed is None:
            width = inner // self.size
            mine = range(self.rank * width, (self.rank + 1) * width)
            if module == "gate_up":
                rows = (mine, range(inner + mine.start, inner + mine.stop))
            else:
                cols = mine
        return BlockPart(shape.rows, shape.cols, rows, cols)

    # -- tensors ---------------------------------------------------------------------------

    def biases(self, biases: Biases) -> Biases:
        """Biases of this rank's blocks: gate_up [E, 2I], down [E, H] by layer.

        Those of sliced down blocks are added once, by rank 0.
        """
        return tuple(
            (
                None if gate_up is None else self._rows(slot, gate_up),
                None if down is None else self._once(slot, down),
            )
            for slot, (gate_up, down) in enumerate(biases)
        )

    def dense(self, layers: DenseExperts) -> DenseExperts:
        """This rank's part of unquantized experts, [E, 2I, H] and [E, H, I] of each layer."""
        run = self.part("down").col_run
        return [
            (self._rows(slot, gate_up), self._own(slot, down)[..., run.start : run.stop].clone())
            for slot, (gate_up, down) in enumerate(layers)
        ]

    def local_ids(self, device: torch.device) -> Tensor:
        """Number on this rank of each expert of the model, e if it is on another: [L, E] int64."""
        assert self.placed is not None
        layers, each, _ = self.placed.shape
        ids = np.full((layers, self.whole.experts), each, dtype=np.int64)
        np.put_along_axis(ids, self.placed[:, :, self.rank], np.arange(each)[None], axis=1)
        return torch.from_numpy(ids).to(device)

    def _own(self, slot: int, tensor: Tensor) -> Tensor:
        """The experts of this rank, of [E, ...]."""
        if self.placed is None:
            return tensor
        return tensor[torch.from_numpy(self.placed[slot, :, self.rank].copy()).to(tensor.device)]

    def _rows(self, slot: int, tensor: Tensor) -> Tensor:
        """The rows of this rank's gate_up blocks, of [E, 2I, ...]."""
        own, runs = self._own(slot, tensor), self.part("gate_up").row_runs
        return torch.cat([own[:, run.start : run.stop] for run in runs], 1)

    def _once(self, slot: int, tensor: Tensor) -> Tensor:
        """What is added to a sum over the ranks: here, or on another rank."""
        kept = self._own(slot, tensor)
        alone = self.placed is not None or self.rank == 0
        return kept if alone else torch.zeros_like(kept)

    # -- plans -----------------------------------------------------------------------------

    def expand(self, of_rank: NDArray[np.int64]) -> NDArray[np.int64]:
        """Numbers of a rank's blocks [n, ...] as numbers of the model's."""
        if self.placed is None:
            return of_rank
        layers, each, size = self.placed.shape
        rest = of_rank.shape[1:]
        numbers = of_rank.reshape(layers, each, len(MODULES), *rest)
        out = np.empty((layers, each * size, len(MODULES), *rest), of_rank.dtype)
        for slot, placed in enumerate(self.placed):
            out[slot, placed.ravel()] = np.repeat(numbers[slot], size, axis=0)
        return out.reshape(-1, *rest)

    def fold(self, state: PlannerState) -> PlannerState:
        """A planner's state of the model's blocks as one of a rank's.

        Blocks that share a width do the sum of their damage and keep the highest of their floors;
        what they cost is counted once, because each rank pays it.
        """
        if self.placed is None:
            return state
        layers, each, _ = self.placed.shape

        def grouped(values: NDArray[Any]) -> NDArray[Any]:
            """[n, ...] of the model's blocks -> [L, e, R, 2, ...]."""
            rest = values.shape[1:]
            by_expert = values.reshape(layers, self.whole.experts, len(MODULES), *rest)
            by_rank: NDArray[Any] = by_expert[np.arange(layers)[:, None, None], self.placed]
            return by_rank

        count = layers * each * len(MODULES)
        return PlannerState(
            widths=state.widths,
            bits=grouped(state.bits)[:, :, 0].reshape(count),
            floors=grouped(state.floors).max(axis=2).reshape(count),
            ceil=grouped(state.ceil)[:, :, 0].reshape(count),
            cost_bytes=grouped(state.cost_bytes)[:, :, 0].reshape(count, -1),
            damage=grouped(state.damage).sum(axis=2).reshape(count, -1),
            layer_of=np.repeat(np.arange(layers), each * len(MODULES)),
            layer_floor=state.layer_floor,
        )
