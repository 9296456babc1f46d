"""At which width each block will mostly be: what a tuned codebook is fitted for.

Axes: L MoE layers, E experts, M modules (gate_up, down), n blocks, W widths.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pw.blocks import MODULES, ExpertGeometry, Module
from pw.errors import ConfigError
from pw.planning.damage import transition_costs
from pw.planning.planner import PlannerState, allocate
from pw.planning.table import BlockTable
from pw.store.artifact import Artifact
from pw.store.manifest import BlocksKey, blocks_name
from pw_kernels.bitplane import lut_bytes, plane_bytes
from pw_pipelines.sharing import WIDEST, choose_table_bytes

_METRIC = "output_gradient"


@dataclass(frozen=True)
class Focus:
    """A width for every block, planned for some number of bytes."""

    bits: float  # uniform widths of so many bits take the bytes that were planned for
    widths: Mapping[BlocksKey, tuple[int, ...]]  # (layer, module) -> E widths
    table_bytes: int | None = None  # of tables that rows share, see `pw_pipelines.sharing`

    def of(self, layer: int, module: Module) -> Tensor:
        """Widths [E] int64 of a layer's blocks."""
        return torch.tensor(self.widths[layer, module])

    def counts(self) -> dict[int, int]:
        """Width -> number of blocks, ascending."""
        every = [width for widths in self.widths.values() for width in widths]
        return {width: every.count(width) for width in sorted(set(every))}

    def settings(self) -> dict[str, Any]:
        """What an artifact writes down: one digit for each expert's width."""
        names = {blocks_name(*key): "".join(map(str, w)) for key, w in self.widths.items()}
        shared = {} if self.table_bytes is None else {"table_bytes": self.table_bytes}
        return {"bits": self.bits, "widths": names, **shared}


def plan_focus(artifact: Artifact, bits: float) -> Focus:
    """The widths of least predicted damage whose bytes are those of uniform widths of `bits`.

    Those bytes are planes and the tables of all widths up to the one in use, as if each row had its
    own; between two widths in proportion. Where rows are short they will share tables, of which one
    is held: the bytes then go further.

    Raises:
        ConfigError: `bits` is outside the artifact's widths.
        StoreError: The artifact has no sensitivities, or stale ones.
    """
    widths = np.array(artifact.manifest.widths)
    if not widths[0] <= bits <= widths[-1]:
        raise ConfigError(
            f"cannot tune for {bits:g} bits: `{artifact.path}` has {widths[0]} to {widths[-1]}",
            "give --bits within them",
        )
    geometry = artifact.geometry
    table_bytes = choose_table_bytes(geometry, int(widths[-1]))
    costs = _resident_bytes(geometry, widths, table_bytes)
    table = BlockTable.from_artifact(
        artifact.table("sensitivity"), _METRIC, geometry, costs, widths
    )
    widest = widths[-1] if table_bytes is None else min(widths[-1], WIDEST)
    state = PlannerState(
        widths=widths,
        bits=np.full(geometry.blocks, widest),
        floors=np.full(geometry.blocks, widths[0]),
        ceil=np.full(geometry.blocks, widest),
        cost_bytes=costs,
        damage=transition_costs(table.sensitivity),
    )
    uniform = _resident_bytes(geometry, widths, None).sum(0).astype(np.float64)
    budget = int(np.interp(bits, widths, uniform))
    chosen = allocate(state, budget).reshape(len(geometry.layers), geometry.experts, len(MODULES))
    found = {
        (layer, module): tuple(chosen[slot, :, place].tolist())
        for slot, layer in enumerate(geometry.layers)
        for place, module in enumerate(MODULES)
    }
    return Focus(bits, found, table_bytes)


def _resident_bytes(
    geometry: ExpertGeometry, widths: NDArray[np.int64], table_bytes: int | None
) -> NDArray[np.int64]:
    """Bytes [n, W] of every block: planes and tables."""
    rows = []
    for shape in map(geometry.shape, MODULES):
        tables = np.array([lut_bytes(shape.rows, int(b)) for b in widths])
        tables = np.cumsum(tables) if table_bytes is None else np.minimum(tables, table_bytes)
        rows.append(widths * plane_bytes(shape.rows, shape.cols) + tables)
    return np.tile(np.array(rows, dtype=np.int64), (geometry.blocks // len(MODULES), 1))
