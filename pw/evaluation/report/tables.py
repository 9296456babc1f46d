"""The tables of a report, as text cells; markdown, console and HTML show the same ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pw.evaluation.report.document import BYTE_CLASSES, INSIDE, scored

_MEBI = 2**20
Described = Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    """A heading, columns, rows of text, and what has to be known to read them."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    words: int = 2  # leading columns that are words, not numbers
    legend: tuple[tuple[str, str], ...] = ()  # what names in the columns mean


METRICS = {
    "acc": "share of items whose right choice has the largest summed log-probability; without "
    "choices: whose whole target is the likeliest",
    "acc_norm": "the same, log-probabilities divided by the characters of the choice",
    "choice_nll": "-log of the right choice's share of the probability of all choices, nats",
    "target_nll": "-log-probability of the whole target, nats",
    "exact_match": "share of items whose written first line is the target (greedy)",
}


def tables(described: Described) -> list[Table]:
    """All tables that have something to say."""
    every = [quality(described), byte_classes(described), *tasks(described), harness(described)]
    return [table for table in every if table.rows]


def quality(described: Described) -> Table:
    """Loss and divergence of every row beside its widths and bytes."""
    whole = _dense_expert_bytes(described)
    reference, with_kl = described["reference"], any(row["kl"] for row in scored(described))
    columns = ["policy", "budget", "mean bits", "widths", "experts, MiB", "of dense"]
    columns += ["used, MiB", "perplexity", f"NLL over {reference} [95\u00a0%]"]
    columns += ["KL from dense [95\u00a0%]"] if with_kl else []
    rows = []
    for row in described["rows"]:
        cells = [row["policy"], budget_of(row)]
        if row["error"] is not None:
            rows.append((*cells, "does not fit", *[""] * (len(columns) - 3)))
            continue
        size = row["bytes"]["experts"]
        cells += [
            f"{row['widths']['mean']:.2f}",
            widths(row),
            mebi(size),
            f"{size / whole:.0%}" if whole else "",
            mebi(row["used_peak_bytes"]),
            f"{row['perplexity']:.3f}",
            interval(row["against_reference"] and row["against_reference"]["nll"]),
        ]
        cells += [interval(row["kl"], 5, sign=False)] if with_kl else []
        rows.append(tuple(cells))
    note = (
        "Widths: share of the blocks at each, mean over the run. Experts: planes and LUTs in whole "
        "pages, mean over the run. Used: most bytes of the budget at any step, KV included. NLL "
        "and KL in nats a token; below zero is better."
    )
    return Table("Quality and bytes", tuple(columns), tuple(rows), note)


def byte_classes(described: Described) -> Table:
    """Every byte by class."""
    rows = scored(described)
    names = [name for name in BYTE_CLASSES if any(row["bytes"][name] for row in rows)]
    cells = []
    for row in rows:
        held = row["bytes"]
        over = f"{row['bytes_over_budget']:,}"
        limit = "" if row["budget_bytes"] is None else mebi(row["budget_bytes"])
        cells.append(
            (
                row["policy"],
                budget_of(row),
                *(mebi(held[name]) for name in names),
                mebi(held["total"] - held["free"]),
                limit,
                over,
            )
        )
    headings = [name if name in INSIDE else f"({name})" for name in names]
    columns = ("policy", "budget", *headings, "used", "limit", "bytes over")
    note = (
        "MiB, means over the forward steps; the sum of the plain columns without free is what was "
        "used. Names in brackets are not part of it:"
    )
    legend = tuple((name, BYTE_CLASSES[name]) for name in names)
    return Table("Bytes by class", columns, tuple(cells), note, legend=legend)


def tasks(described: Described) -> list[Table]:
    """A table for each task: a row for each policy, two columns for each metric."""
    reference, found = described["reference"], []
    for place, task in enumerate(described["tasks"]):
        rows = [(row, row["tasks"][place]) for row in scored(described)]
        metrics = list(rows[0][1]["metrics"])
        columns = [name for metric in metrics for name in (metric, f"minus {reference}")]
        cells = [
            (
                row["policy"],
                budget_of(row),
                f"{result['mean_bits']:.2f}",
                *(cell for metric in metrics for cell in _metric(result, metric)),
            )
            for row, result in rows
        ]
        result = rows[0][1]
        title = f"Task {task['name']}, {result['items']} items"
        title += f", {task['num_fewshot']} examples" if task["num_fewshot"] else ""
        note = "" if task["chance"] is None else f"Chance is {task['chance']:.3f}; ~ not above it. "
        if result["truncated"]:
            note += f"{result['truncated']} prompts were too long and lost their beginning. "
        legend = tuple((metric, METRICS[metric]) for metric in metrics)
        found.append(
            Table(
                title,
                ("policy", "budget", "mean bits", *columns),
                tuple(cells),
                note.strip(),
                legend=legend,
            )
        )
    return found


def _metric(result: Described, metric: str) -> tuple[str, str]:
    """Value, marked where it is not above chance, and its difference from the reference."""
    value, chance = result["metrics"][metric], result["chance"]
    marked = chance is not None and metric in ("acc", "acc_norm") and value["low"] <= chance
    shown = ("~ " if marked else "") + interval(value, 3, sign=False)
    return shown, interval(result["against_reference"].get(metric), 3)


def harness(described: Described) -> Table:
    """What lm-evaluation-harness reports."""
    rows = [
        (
            f"{found['task']} ({found['items']})",
            row["policy"],
            budget_of(row),
            f"{found['mean_bits']:.2f}",
            ", ".join(f"{name} {value:.4f}" for name, value in found["metrics"].items()),
        )
        for row in scored(described)
        for found in row["harness"]
    ]
    columns = ("task (items)", "policy", "budget", "mean bits", "metrics")
    return Table("lm-evaluation-harness", columns, tuple(rows), "In its own words.", 3)


@dataclass(frozen=True)
class Finding:
    """What the figures say about a row that a budget governs."""

    verdict: str  # better | worse | even | failed
    sentence: str


_VERDICTS = {"better": "better than", "worse": "worse than", "even": "no different from"}


def findings(described: Described) -> list[Finding]:
    """One for each row that a budget governs."""
    found = []
    for row in described["rows"]:
        place = f"{row['policy']} in {budget_of(row)}"
        if row["error"] is not None:
            found.append(Finding("failed", f"{place} could not run: {row['error']}."))
            continue
        rival = row["against_best_fixed"]
        if rival is None:
            continue
        low, high = rival["nll"]["low"], rival["nll"]["high"]
        verdict = "better" if high < 0 else "worse" if low > 0 else "even"
        sentence = (
            f"{place} is {_VERDICTS[verdict]} the best fixed policy that fits, "
            f"{rival['policy']}: {interval(rival['nll'])} nats a token"
        )
        sentence += f"; KL from dense {interval(rival['kl'])}." if rival["kl"] else "."
        found.append(Finding(verdict, sentence))
    return found


def budget_of(row: Described) -> str:
    """The budget of a row, or those in which its fixed widths fit."""
    if row["budget"] is None:
        return f"fits {', '.join(row['fits'])}" if row.get("fits") else ""
    size = mebi(row["budget_bytes"])
    return f"{row['budget']} ({size} MiB)" if ":" in row["budget"] else str(row["budget"])


def widths(row: Described) -> str:
    """The widths that a row ran with, as words."""
    held = row["widths"]
    share = {int(width): part for width, part in held["share"].items()}
    if not share:
        return "unquantized"
    if len(share) == 1:
        return f"all {next(iter(share))}"
    parts = ", ".join(f"{width}: {part:.0%}" for width, part in share.items() if part >= 0.005)
    moved = held["most"] - held["least"] >= 0.005
    return parts + (f"; mean {held['least']:.2f} to {held['most']:.2f}" if moved else "")


def interval(value: Mapping[str, float] | None, digits: int = 4, *, sign: bool = True) -> str:
    """A mean with its interval."""
    if value is None:
        return ""
    form = f"{'+' if sign else ''}.{digits}f"
    return f"{value['mean']:{form}} [{value['low']:{form}}, {value['high']:{form}}]"


def mebi(size: int) -> str:
    """Bytes as MiB."""
    return f"{size / _MEBI:.2f}"


def _dense_expert_bytes(described: Described) -> int | None:
    rows: Sequence[Described] = scored(described)
    return next((row["bytes"]["experts"] for row in rows if row["policy"] == "dense"), None)
