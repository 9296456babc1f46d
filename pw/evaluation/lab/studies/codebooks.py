"""Our codebooks against Any-Precision LLM's, each with uniform widths and with planned ones.

All rows of a budget have the same bytes: widths and tables are of the same size. APL's codebooks
come from an artifact of their own (`--apl`); the rest is the same model and text.
"""

from __future__ import annotations

from typing import Any

from pw.errors import ConfigError
from pw.evaluation.baselines.uniform import stepped
from pw.evaluation.lab.cache import CachedLab
from pw.evaluation.lab.lab import Lab
from pw.evaluation.lab.model import LabModel
from pw.evaluation.lab.planned import ProductPlanner
from pw.evaluation.lab.room import BUDGETS, Room
from pw.evaluation.lab.studies.common import Row, compared, interval, markdown, show, size

OURS, APL = "PagedWeight's", "APL's (k-means, splits)"


def run(room: Room) -> dict[str, Any]:
    """Score both codebooks at all budgets."""
    if room.texts.apl is None:
        raise ConfigError("this study needs an artifact with APL's codebooks", "give --apl")
    apl = LabModel.open(room.texts.apl, room.model.checkpoint.path, room.model.device)
    rows: list[Row] = []
    for text, own in (("held-out", room.heldout), ("other", room.other)):
        if own is None:
            continue
        theirs = CachedLab(Lab(apl, own.lab.windows, like=own.lab), room.memory)
        for mean in BUDGETS:
            rows += [{"text": text} | row for row in _rows(room, own, theirs, mean)]
    return {"rows": rows}


def _rows(room: Room, own: CachedLab, theirs: CachedLab, mean: float) -> list[Row]:
    budget = room.budget(mean)
    step = stepped(room.costs, room.model.widths, budget)
    baseline = theirs.score(step)
    rows = []
    for name, lab in ((OURS, own), (APL, theirs)):
        planned = ProductPlanner(lab.model, lab.model.artifact, room.costs).bits(budget)
        for widths, bits in (("planned", planned), ("uniform, blind steps", step)):
            scores = lab.score(bits)
            row = {"budget_bits": mean, "codebooks": name, "widths": widths, **size(room, bits)}
            row |= compared(scores, own.dense, baseline)
            row["nll_over_uniform_of_own"] = interval(scores.nll, lab.score(step).nll)
            rows.append(row)
    return rows


def tables(result: dict[str, Any]) -> str:
    """Markdown, a table for each text."""
    texts = dict.fromkeys(row["text"] for row in result["rows"])
    return "\n\n".join(f"{text} text\n\n{_table(result, text)}" for text in texts)


def _table(result: dict[str, Any], text: str) -> str:
    head = (
        "bits", "codebooks", "widths", "bytes %", "ppl", "NLL over BF16 [95 %]",
        "NLL over APL uniform [95 %]", "won back %", "KL", "KL won back %",
    )  # fmt: skip
    rows = [
        (
            f"{row['budget_bits']:g}", row["codebooks"], row["widths"],
            f"{100 * row['share']:.1f}", row["perplexity"], show(row["nll"]),
            show(row["nll_over_uniform"]),
            "-" if row["won_back"] is None else f"{100 * row['won_back']:.0f}",
            f"{row['kl']['mean']:.4f}", f"{100 * row['won_back_kl']:.0f}",
        )
        for row in result["rows"]
        if row["text"] == text
    ]  # fmt: skip
    return markdown(head, rows)
