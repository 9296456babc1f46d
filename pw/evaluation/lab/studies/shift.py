"""Text that routes differently from the calibration text: do routing and residual win it back?

The planner's tables come from the mixed calibration text, and from prose alone; planes and LUTs
are the same. Static allocations stand; online ones follow the prompts of each kind of text.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pw.config import PlannerConfig
from pw.errors import ConfigError
from pw.evaluation.baselines.uniform import stepped
from pw.evaluation.lab.online import Stream, domain_bits, online_bits, streams
from pw.evaluation.lab.planned import ProductPlanner
from pw.evaluation.lab.room import Room
from pw.evaluation.lab.studies.common import Row, compared, interval, markdown, show
from pw.store.artifact import Artifact

LENGTHS = {"prose": 1024, "code": 1024, "key-value": 1024, "reasoning": 1024}
BUDGETS = (2.5,)
STATIC = "static"
# Settings of the planner, and what it follows.
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    STATIC: ({}, {"routing": False}),
    "routing (buckets)": ({"routing_rule": "buckets"}, {}),
    "routing (plain ratio)": ({"evidence_prior": 0}, {}),
    "routing (default)": ({}, {}),
    "learned residual": ({}, {"routing": False, "residual": "learned"}),
    "routing (buckets) + learned residual": (
        {"routing_rule": "buckets"},
        {"residual": "learned"},
    ),
    "routing (default) + learned residual": ({}, {"residual": "learned"}),
    "routing (default) + exact residual": ({}, {"residual": "exact"}),
}


def run(room: Room) -> dict[str, Any]:
    """Score each variant with both calibrations on each kind of text."""
    if room.texts.narrow is None:
        raise ConfigError("this study needs an artifact calibrated on prose", "give --narrow")
    calibrations = {"mixed": room.model.artifact, "prose": Artifact.open(room.texts.narrow)}
    rows: list[Row] = []
    for calibration, tables in calibrations.items():
        default = PlannerConfig()
        planners = {
            name: ProductPlanner(room.model, tables, room.costs, replace(default, **settings))
            for name, (settings, _) in VARIANTS.items()
        }
        for stream in streams(room, tables, LENGTHS, default.residual_clamp):
            for mean in BUDGETS:
                rows += _rows(room, planners, stream, mean, calibration)
    return {"rows": rows}


def _rows(
    room: Room,
    planners: dict[str, ProductPlanner],
    stream: Stream,
    mean: float,
    calibration: str,
) -> list[Row]:
    """One kind of text, one budget, one calibration."""
    budget, lab = room.budget(mean), stream.lab
    uniform = lab.score(stepped(room.costs, room.model.widths, budget))
    head = {"text": stream.kind, "budget_bits": mean, "calibration": calibration}
    static = lab.score(online_bits(planners[STATIC], stream, budget, routing=False))
    buckets = lab.score(online_bits(planners["routing (buckets)"], stream, budget))
    rows = []
    for name, (_, followed) in VARIANTS.items():
        scores = lab.score(online_bits(planners[name], stream, budget, **followed))
        row = head | {"variant": name} | compared(scores, lab.dense, uniform)
        row["nll_over_static"] = interval(scores.nll, static.nll)
        row["kl_over_static"] = interval(scores.kl, static.kl)
        row["kl_over_buckets"] = interval(scores.kl, buckets.kl)
        rows.append(row)
    if calibration == "mixed":
        scores = lab.score(domain_bits(room, stream.kind, LENGTHS[stream.kind], budget))
        row = head | {"variant": "static, calibrated on this kind of text (exact ILP)"}
        row |= compared(scores, lab.dense, uniform)
        row["nll_over_static"] = interval(scores.nll, static.nll)
        row["kl_over_static"] = interval(scores.kl, static.kl)
        rows.append(row | {"calibration": "own"})
    return rows


def tables(result: dict[str, Any]) -> str:
    """Markdown: KL of each variant, and its distance from the static plan of the same tables."""
    texts = list(dict.fromkeys(row["text"] for row in result["rows"]))
    variants = list(dict.fromkeys((row["calibration"], row["variant"]) for row in result["rows"]))
    value = {(r["calibration"], r["variant"], r["text"]): r for r in result["rows"]}
    rows = []
    for variant in variants:
        found = [value[*variant, text] for text in texts]
        cells = [f"{row['kl']['mean']:.4f}, {show(row['kl_over_static'])}" for row in found]
        rows.append([*variant, *cells])
    uniform = [value["mixed", STATIC, text] for text in texts]
    cells = [f"{row['kl']['mean'] - row['kl_over_uniform']['mean']:.4f}" for row in uniform]
    rows.append(["none", "uniform, blind steps", *cells])
    head = [f"{text}: KL, over static [95 %]" for text in texts]
    return markdown(["calibration", "variant", *head], rows)
