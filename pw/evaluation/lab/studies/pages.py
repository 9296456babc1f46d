"""What padding to whole pages costs, by page size: bytes, and loss at the same total bytes."""

from __future__ import annotations

from typing import Any

import torch

from pw.evaluation.lab.costs import Costs, page_costs
from pw.evaluation.lab.planned import ProductPlanner
from pw.evaluation.lab.room import Room
from pw.evaluation.lab.studies.common import interval, markdown, show
from pw.memory.budget import layouts_of
from pw.memory.kv_layout import token_bytes

SIZES = (4096, 8192, 16384, 32768)
SHARE = 0.28  # of the unquantized bytes, at which the loss is measured
_WIDTHS = (2, 3, 4)
_KV = torch.bfloat16


def run(room: Room) -> dict[str, Any]:
    """Count bytes at every page size; score the planner's widths that fit the same bytes."""
    model, lab = room.model, room.heldout
    stored = model.widths[0], model.widths[-1]
    tables = model.artifact.table_bytes
    layouts = layouts_of(model.geometry, model.checkpoint.kv, _KV, stored, None, tables)
    chosen = layouts[0].page_bytes
    budget, rows = int(SHARE * room.dense_bytes), []
    baseline = lab.score(ProductPlanner(model, model.artifact, _costs(room, chosen)).bits(budget))
    token = max(token_bytes(layer, _KV) for layer in model.checkpoint.kv.stored)
    for page in SIZES:
        if page < token:
            continue
        costs = _costs(room, page)
        if costs[:, 0].sum() > budget:
            continue
        row: dict[str, Any] = {"page_bytes": page, "chosen": page == chosen}
        row["kv_tokens_a_page"] = page // token
        row["widths"] = [_width(room, costs, page, width) for width in _WIDTHS]
        scores = lab.score(ProductPlanner(model, model.artifact, costs).bits(budget))
        row["nll"] = interval(scores.nll, lab.dense.nll)
        row["nll_over_chosen"] = interval(scores.nll, baseline.nll)
        rows.append(row)
    return {"rows": rows, "share": SHARE}


def _costs(room: Room, page: int) -> Costs:
    model = room.model
    stored = model.widths[0], model.widths[-1]
    return page_costs(
        model.geometry, model.checkpoint.kv, stored, _KV, page, model.artifact.table_bytes
    )


def _width(room: Room, costs: Costs, page: int, width: int) -> dict[str, float]:
    """Bytes of one uniform width, and how many of them are padding."""
    geometry, widths = room.model.geometry, room.model.widths
    stored = widths[0], widths[-1]
    layouts = layouts_of(
        geometry, room.model.checkpoint.kv, _KV, stored, page, room.model.artifact.table_bytes
    )
    used = sum(layout.useful_bytes(width) for layout in layouts) * geometry.blocks // len(layouts)
    total = int(costs[:, width - widths[0]].sum())
    return {"bits": width, "bytes": total, "padding": round(1 - used / total, 4)}


def tables(result: dict[str, Any]) -> str:
    """Markdown."""
    head = (
        "page", "KV tokens a page",
        *(f"uniform {bits}: MB (padding %)" for bits in _WIDTHS),
        f"NLL over BF16 at {100 * result['share']:.0f} % of its bytes [95 %]",
        "over the chosen page's [95 %]",
    )  # fmt: skip
    rows = [
        (
            f"{row['page_bytes'] // 1024} KiB" + (" (chosen)" if row["chosen"] else ""),
            row["kv_tokens_a_page"],
            *(f"{w['bytes'] / 1e6:.2f} ({100 * w['padding']:.1f})" for w in row["widths"]),
            show(row["nll"]), show(row["nll_over_chosen"]),
        )
        for row in result["rows"]
    ]  # fmt: skip
    return markdown(head, rows)
