"""What the ways of holding lookup tables are worth: predicted loss at the same total bytes.

No text is read: plans and predictions come from the artifact's own sensitivities, so that ways that
nothing implements can be compared. What shares tables is fitted less well than is assumed here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pw.blocks import MODULES
from pw.evaluation.baselines.static import hull
from pw.evaluation.lab.costs import LONG_ROW, Costs, bare_costs, mean_bits, total_bytes
from pw.evaluation.lab.room import Room
from pw.evaluation.lab.studies.common import markdown
from pw.memory.layout import BlockLayout
from pw.planning.damage import transition_costs

SHARE = 0.28  # of the unquantized bytes
_BYTE = 1  # as a page: no padding
_NONE = -1  # bits of a base tree that does not exist: only the table in use is held


def run(room: Room) -> dict[str, Any]:
    """Plan for every way of holding tables."""
    model = room.model
    scores = model.artifact.table("sensitivity").arrays["output_gradient"]
    scores = scores.reshape(model.geometry.blocks, -1).astype(np.float64)
    budget, rows = int(SHARE * room.dense_bytes), []
    for name, costs in _ways(room):
        bits = hull(transition_costs(scores), costs, model.widths, budget)
        damage = scores[np.arange(len(bits)), bits - model.widths[0]].sum()
        counts = np.bincount(bits, minlength=model.widths[-1] + 1)[model.widths[0] :]
        rows.append(
            {
                "way": name,
                "mean_bits": round(mean_bits(model.geometry, bits), 3),
                "bytes": total_bytes(costs, model.widths, bits),
                "predicted": round(float(damage), 6),
                "blocks": counts.tolist(),
            }
        )
    return {"rows": rows, "widths": list(model.widths), "share": SHARE}


def _ways(room: Room) -> list[tuple[str, Costs]]:
    """Name and bytes [n, W] of each."""
    geometry, widths = room.model.geometry, room.model.widths

    def held(page: int, base: int = _NONE, table_bytes: int | None = None) -> Costs:
        rows = []
        for shape in map(geometry.shape, MODULES):
            low, high = widths[0], widths[-1]
            layout = BlockLayout(shape, low, high, base, page, table_bytes)
            rows.append([layout.resident_pages(bits) * page for bits in widths])
        return np.tile(np.array(rows, dtype=np.int64), (geometry.blocks // len(MODULES), 1))

    return [
        ("as the engine holds this artifact", room.costs),
        ("tables of 2 and 3 bits always, pages of 4 KiB", held(4096, 3)),
        ("tables of 2 bits always, pages of 4 KiB", held(4096, 2)),
        ("the table in use alone, pages of 16 KiB", held(16384)),
        ("the table in use alone, pages of 4 KiB", held(4096)),
        ("the table in use alone, 16 KiB shared", held(16384, table_bytes=16384)),
        ("the table in use alone, 8 KiB shared", held(8192, table_bytes=8192)),
        ("the table in use alone, 4 KiB shared", held(4096, table_bytes=4096)),
        ("2 KiB shared, no padding", held(_BYTE, table_bytes=2048)),
        (f"the table in use alone, as at K = {LONG_ROW}", bare_costs(geometry, widths, LONG_ROW)),
        ("tables for nothing", held(_BYTE, table_bytes=_BYTE)),
    ]


def tables(result: dict[str, Any]) -> str:
    """Markdown."""
    widths = result["widths"]
    head = ("tables", "mean bits", "predicted loss", f"blocks at {widths[0]} to {widths[-1]} bits")
    rows = [
        (
            row["way"],
            f"{row['mean_bits']:.2f}",
            f"{row['predicted']:.5f}",
            " ".join(map(str, row["blocks"])),
        )
        for row in result["rows"]
    ]
    return markdown(head, rows)
