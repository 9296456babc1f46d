"""The fewest bytes at which the loss is that of the unquantized model, inside the paired interval.

Once with bytes as they are, once as if LUTs cost what they cost at rows of 2,048 columns (planned
for those costs too). Where rows share their tables (`pw tune`) they cost no more than that already.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pw.evaluation.baselines.uniform import uniform
from pw.evaluation.lab.costs import LONG_ROW, bare_costs, total_bytes
from pw.evaluation.lab.planned import ProductPlanner
from pw.evaluation.lab.room import Room
from pw.evaluation.lab.studies.common import Row, interval, markdown, show, size

TARGET = 0.72  # of the routed-expert bytes
BUDGETS = {"as they are": (3.5, 4.0, 4.5, 5.0), f"K = {LONG_ROW}": (4.5,)}  # mean bits


def run(room: Room) -> dict[str, Any]:
    """Score allocations of rising bytes."""
    model = room.model
    long_rows = bare_costs(model.geometry, model.widths, LONG_ROW)
    rows: list[Row] = []
    for label, costs in zip(BUDGETS, (room.costs, long_rows), strict=True):
        if costs is long_rows and model.artifact.table_bytes is not None:
            continue
        planner = ProductPlanner(model, model.artifact, costs)
        budgets = {f"{mean:g}": _bytes_at(costs, model.widths, mean) for mean in BUDGETS[label]}
        budgets["28 % of BF16"] = int((1 - TARGET) * room.dense_bytes)
        for name, budget in budgets.items():
            bits = planner.bits(budget)
            share = total_bytes(costs, model.widths, bits) / room.dense_bytes
            rows.append(_row(room, label, f"PagedWeight, {name}", bits, share))
        for width in (4, 5, 6):
            bits = uniform(model.geometry.blocks, width)
            share = total_bytes(costs, model.widths, bits) / room.dense_bytes
            rows.append(_row(room, label, f"uniform {width}", bits, share))
    return {"rows": sorted(rows, key=lambda row: (row["luts"], row["share_counted"]))}


def _row(room: Room, label: str, name: str, bits: Any, share: float) -> Row:
    lab = room.heldout
    scores = lab.score(bits)
    found = interval(scores.nll, lab.dense.nll)
    return {
        "luts": label,
        "allocation": name,
        "share_counted": round(share, 4),
        **size(room, bits),
        "nll": found,
        "kl": interval(scores.kl),
        "equal": found["low"] <= 0 <= found["high"],
    }


def _bytes_at(costs: Any, widths: range, mean: float) -> int:
    return int(np.interp(mean, np.array(widths), costs.sum(0).astype(np.float64)))


def tables(result: dict[str, Any]) -> str:
    """Markdown."""
    head = ("LUTs", "allocation", "mean bits", "bytes saved %", "NLL over BF16 [95 %]", "KL", "0?")
    rows = [
        (
            row["luts"],
            row["allocation"],
            f"{row['mean_bits']:.2f}",
            f"{100 * (1 - row['share_counted']):.1f}",
            show(row["nll"]),
            f"{row['kl']['mean']:.5f}",
            "yes" if row["equal"] else "no",
        )
        for row in result["rows"]
    ]
    return markdown(head, rows)
