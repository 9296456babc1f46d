"""Where the bytes of planned widths go, and where their predicted loss comes from.

At 28 % of the unquantized bytes, by the artifact's own sensitivities; no text is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pw.blocks import MODULES
from pw.evaluation.lab.planned import ProductPlanner
from pw.evaluation.lab.room import Room
from pw.evaluation.lab.studies.common import markdown
from pw.evaluation.lab.studies.held_tables import SHARE


def run(room: Room) -> dict[str, Any]:
    """Plan and add up."""
    model = room.model
    geometry, widths = model.geometry, model.widths
    planner = ProductPlanner(model, model.artifact, room.costs)
    bits = planner.bits(int(SHARE * room.dense_bytes))
    scores = model.artifact.table("sensitivity").arrays["output_gradient"]
    place = np.arange(len(bits)), bits - widths[0]
    damage = scores.reshape(len(bits), -1).astype(np.float64)[place]
    held = room.costs[place]
    weights = np.array([geometry.shape(key.module).weights for key in geometry.keys()])
    planes = weights * bits // 8
    rows = [
        {
            "part": name,
            "blocks": int(some.sum()),
            "bits": round(8 * float(planes[some].sum() / max(1, weights[some].sum())), 3),
            "bytes": int(held[some].sum()),
            "planes": int(planes[some].sum()),
            "predicted": float(damage[some].sum()),
        }
        for name, some in _parts(room, bits)
    ]
    return {"rows": rows, "share": SHARE}


def _parts(room: Room, bits: NDArray[np.int64]) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    """Name and blocks [n] of all together, of each layer and module, and of each width."""
    geometry = room.model.geometry
    keys = list(geometry.keys())
    yield "all", np.full(len(keys), True)
    for layer in geometry.layers:
        for module in MODULES:
            yield (
                f"layer {layer}, {module}",
                np.array([key.layer == layer and key.module == module for key in keys]),
            )
    for width in room.model.widths:
        yield f"{width} bits", bits == width


def tables(result: dict[str, Any]) -> str:
    """Markdown."""
    head = ("part", "blocks", "mean bits", "MB", "of them tables, padding", "predicted loss")
    rows = [
        (
            row["part"],
            row["blocks"],
            f"{row['bits']:.2f}",
            f"{row['bytes'] / 1e6:.3f}",
            f"{(row['bytes'] - row['planes']) / 1e6:.3f}",
            f"{row['predicted']:.6f}",
        )
        for row in result["rows"]
    ]
    return markdown(head, rows)
