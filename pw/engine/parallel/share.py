"""What one rank holds of a model that several ranks share. Arithmetic; no processes.

    by slices   every rank has a part of every expert: rows of gate and up, columns of down
    by experts  every rank has whole experts, as many as every other

Either way all ranks have blocks of the same shapes, in the same number, so that one plan is a plan
for each of them: block i is as wide on every rank, in the same pages of every arena.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from pw.blocks import BlockKey, BlockShape, ExpertGeometry, Module
from pw.errors import ConfigError
from pw_kernels.slicing import BlockPart

Biases = tuple[tuple[Tensor | None, Tensor | None], ...]
DenseExperts = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Share:
    """The part of one rank.

    Raises:
        ConfigError: The routed experts cannot be shared evenly, with the numbers.
    """

    whole: ExpertGeometry  # of the model
    rank: int
    size: int
    by_expert: bool

    def __post_init__(self) -> None:
        count, what = self.whole.down.cols, "inner columns of each expert"
        hint = "use another --tensor-parallel-size, or --enable-expert-parallel"
        if self.by_expert:
            count, what = self.whole.experts, "routed experts"
            hint = "use another --tensor-parallel-size, or leave --enable-expert-parallel out"
        if count % self.size:
            raise ConfigError(f"{count} {what} cannot be shared evenly by {self.size} ranks", hint)

    @cached_property
    def geometry(self) -> ExpertGeometry:
        """The blocks of this rank; layers keep their numbers."""
        if self.by_expert:
            return replace(self.whole, experts=self.whole.experts // self.size)
        gate_up, down = (BlockShape(*self.part(module).shape) for module in ("gate_up", "down"))
        return replace(self.whole, gate_up=gate_up, down=down)

    @property
    def members(self) -> list[list[int]]:
        """For each expert of a rank the experts of the model that it is, rank by rank."""
        each = self.geometry.experts
        if not self.by_expert:
            return [[expert] for expert in range(each)]
        return [[rank * each + expert for rank in range(self.size)] for expert in range(each)]

    def key(self, key: BlockKey) -> BlockKey:
        """The block of the model that a block of this rank is, or is a part of."""
        return replace(key, expert=self.members[key.expert][self.rank]) if self.by_expert else key

    def part(self, module: Module) -> BlockPart:
        """What this rank keeps of each of its blocks."""
        shape, inner = self.whole.shape(module), self.whole.down.cols
        rows: tuple[range, ...] = (range(shape.rows),)
        cols = range(shape.cols)
        if not self.by_expert:
            width = inner // self.size
            mine = range(self.rank * width, (self.rank + 1) * width)
            if module == "gate_up":
                rows = (mine, range(inner + mine.start, inner + mine.stop))
            else:
                cols = mine
        return BlockPart(shape.rows, shape.cols, rows, cols)

    def biases(self, biases: Biases) -> Biases:
        """Biases of this rank's blocks: gate_up [E, 2I], down [E, H] by layer.

        Those of sliced down blocks are added once, by rank 0.
        """
        return tuple(
            (
                None if gate_up is None else self._rows(gate_up),
                None if down is None else self._once(down),
            )
            for gate_up, down in biases
        )

    def dense(self, layers: DenseExperts) -> DenseExperts:
        """This rank's part of unquantized experts, [E, 2I, H] and [E, H, I] of each layer."""
        run = self.part("down").col_run
        return [
            (self._rows(gate_up), self._own(down)[..., run.start : run.stop].contiguous())
            for gate_up, down in layers
        ]

    def local_ids(self, device: torch.device) -> Tensor:
        """Number on this rank of each expert of the model, or one past the last: [E] int64."""
        ids = torch.full((self.whole.experts,), self.geometry.experts, dtype=torch.int64)
        for local, members in enumerate(self.members):
            ids[members[self.rank]] = local
        return ids.to(device)

    def _own(self, tensor: Tensor) -> Tensor:
        """The experts of this rank, of [E, ...]."""
        return tensor[[members[self.rank if self.by_expert else 0] for members in self.members]]

    def _rows(self, tensor: Tensor) -> Tensor:
        """The rows of this rank's gate_up blocks, of [E, 2I, ...]."""
        runs = self.part("gate_up").row_runs
        return torch.cat([self._own(tensor)[:, run.start : run.stop] for run in runs], 1)

    def _once(self, tensor: Tensor) -> Tensor:
        """What is added to a sum over the ranks: here, or on another rank."""
        kept = self._own(tensor)
        return kept if self.by_expert or self.rank == 0 else torch.zeros_like(kept)
