"""Identity and shape of a block: one linear map of one expert. Knows no tensors and no pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Module = Literal["gate_up", "down"]
MODULES: tuple[Module, Module] = ("gate_up", "down")


@dataclass(frozen=True, order=True, slots=True)
class BlockKey:
    """One linear map of one expert. `layer` is the model's own layer index (dense layers keep
    theirs, so the indices of MoE layers may have gaps).
    """

    layer: int
    expert: int
    module: Module

    def __str__(self) -> str:
        return f"layer {self.layer} expert {self.expert} {self.module}"


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Rows N (outputs) and columns K (inputs) of a block."""

    rows: int
    cols: int

    @property
    def weights(self) -> int:
        """Number of weights, N * K."""
        return self.rows * self.cols


@dataclass(frozen=True, slots=True)
class ExpertGeometry:
    """The routed experts of a model: which layers, how many experts, block shapes.

    Blocks are indexed densely by (slot, expert, module) where slot = position in `layers`.
    All MoE layers of a model share E and shapes (true of every supported architecture).
    """

    layers: tuple[int, ...]  # model layer index of each MoE layer, ascending
    experts: int  # E
    top_k: int
    gate_up: BlockShape  # [2I, H] (or [I, H] for models without a gate)
    down: BlockShape  # [H, I]

    def shape(self, module: Module) -> BlockShape:
        """Shape of the blocks of one module."""
        return self.gate_up if module == "gate_up" else self.down

    @property
    def blocks(self) -> int:
        """Number of blocks, L * E * 2."""
        return len(self.layers) * self.experts * len(MODULES)

    @property
    def weights(self) -> int:
        """Number of routed expert weights."""
        return len(self.layers) * self.experts * (self.gate_up.weights + self.down.weights)

    def keys(self) -> Iterator[BlockKey]:
        """All block keys in index order: layer, expert, module."""
        for layer in self.layers:
            for expert in range(self.experts):
                for module in MODULES:
                    yield BlockKey(layer, expert, module)

    def slot(self, layer: int) -> int:
        """Dense index of a model layer among the MoE layers."""
        return self.layers.index(layer)

    def index(self, key: BlockKey) -> int:
        """Dense index of a block: (slot * E + expert) * 2 + module."""
        module = MODULES.index(key.module)
        return (self.slot(key.layer) * self.experts + key.expert) * len(MODULES) + module

    def key(self, index: int) -> BlockKey:
        """Inverse of `index`."""
        pair, module = divmod(index, len(MODULES))
        slot, expert = divmod(pair, self.experts)
        return BlockKey(self.layers[slot], expert, MODULES[module])
