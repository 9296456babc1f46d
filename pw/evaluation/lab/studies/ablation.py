"""Each part of the planner taken away, at three budgets, over all kinds of text together.

The full planner is the product's default with routing and the learned residual, which the product
uses when asked to; a part is worth what its absence costs (positive = worse without it). Movement
and hysteresis need memory that changes: see the study `memory`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from pw.config import PlannerConfig
from pw.errors import BudgetError
from pw.evaluation.baselines.controls import frequency_damage
from pw.evaluation.baselines.static import hull
from pw.evaluation.baselines.uniform import stepped
from pw.evaluation.lab.costs import Costs, total_bytes
from pw.evaluation.lab.lab import Scores
from pw.evaluation.lab.model import Bits
from pw.evaluation.lab.online import Stream, online_bits, streams
from pw.evaluation.lab.planned import ProductPlanner
from pw.evaluation.lab.room import Room
from pw.evaluation.lab.studies.common import Row, interval, pivot, show
from pw.evaluation.lab.studies.shift import LENGTHS

BUDGETS = (2.5, 3.0, 3.5)
FULL = "full: token-wise sensitivity, routing, learned residual, hull"

Plans = Callable[[Stream, int], list[Bits]]


def run(room: Room) -> dict[str, Any]:
    """Score all ablations."""
    tables = room.model.artifact
    found = streams(room, tables, LENGTHS, PlannerConfig().residual_clamp)
    rows: list[Row] = []
    for mean in BUDGETS:
        budget = room.budget(mean)
        full: Scores | None = None
        for name, plans in ablations(room):
            try:
                scores = joined([stream.lab.score(plans(stream, budget)) for stream in found])
            except BudgetError as error:
                rows.append({"budget_bits": mean, "variant": name, "failed": error.message})
                continue
            full = full or scores
            dense = joined([stream.lab.dense for stream in found])
            rows.append(
                {
                    "budget_bits": mean,
                    "variant": name,
                    "nll": interval(scores.nll, dense.nll),
                    "kl": interval(scores.kl),
                    "nll_over_full": interval(scores.nll, full.nll),
                    "kl_over_full": interval(scores.kl, full.kl),
                }
            )
    return {"rows": rows, "windows": sum(len(stream.prompts) for stream in found)}


def ablations(room: Room) -> Iterator[tuple[str, Plans]]:
    """Name and plans of each variant, the full planner first."""
    default = PlannerConfig()

    def product(
        config: PlannerConfig = default, planned: Costs | None = None, **seen: Any
    ) -> Plans:
        planner = ProductPlanner(room.model, room.model.artifact, room.costs, config, planned)
        seen = {"residual": "learned"} | seen
        return lambda stream, budget: online_bits(planner, stream, budget, **seen)

    yield FULL, product()
    yield "no sensitivity (routing frequency alone)", _frequency(room)
    yield "hessian sensitivity (the paper's)", product(replace(default, metric="hessian"))
    yield "no routing", product(routing=False)
    yield "buckets of routing (the paper's)", product(replace(default, routing_rule="buckets"))
    yield "no shrinkage of the damage rates", product(replace(default, evidence_prior=0))
    yield "no residual", product(residual="off")
    yield "no routing, no residual (static)", product(routing=False, residual="off")
    yield "exact residual", product(residual="exact")
    yield "greedy (the paper's) for hull", product(replace(default, planner="greedy"))
    yield "LUT-blind bytes", _lut_blind(room, product)
    yield "no shrinkage of the routing mass", product(replace(default, routing_prior=0))
    yield (
        "uniform, blind steps",
        lambda stream, budget: (
            [stepped(room.costs, room.model.widths, budget)] * len(stream.prompts)
        ),
    )


def joined(parts: list[Scores]) -> Scores:
    """Scores of several streams as one."""
    return Scores(
        np.concatenate([part.nll for part in parts]), np.concatenate([part.kl for part in parts])
    )


def _frequency(room: Room) -> Plans:
    """The stream's own routing of late, and nothing of what the blocks are."""
    planner = ProductPlanner(room.model, room.model.artifact, room.costs)

    def plans(stream: Stream, budget: int) -> list[Bits]:
        stats, found = planner.new_stats(), []
        for prompt in stream.prompts:
            stats.update(prompt.mass, prompt.tokens)
            damage = frequency_damage(room.model.geometry, stats.mass(), room.model.widths)
            found.append(hull(damage, room.costs, room.model.widths, budget))
        return found

    return plans


def _lut_blind(room: Room, product: Callable[..., Plans]) -> Plans:
    """A planner that counts planes alone, given the largest budget whose true bytes still fit."""
    widths = np.array(room.model.widths)
    planes = room.costs[:, :1] * 0 + np.diff(room.costs, axis=1)[:, :1] * widths
    blind = product(planned=planes)

    def plans(stream: Stream, budget: int) -> list[Bits]:
        low, high = int(planes[:, 0].sum()), int(planes[:, -1].sum())
        best = blind(stream, low)
        for _ in range(12):
            middle = (low + high) // 2
            tried = blind(stream, middle)
            if all(total_bytes(room.costs, room.model.widths, b) <= budget for b in tried):
                low, best = middle, tried
            else:
                high = middle
        return best

    return plans


def tables(result: dict[str, Any]) -> str:
    """Markdown: divergence, then loss, of every variant at every budget."""
    parts = []
    for title, name in (("KL", "kl"), ("NLL over BF16", "nll")):

        def cell(row: Row, name: str = name) -> str:
            over = "" if row["variant"] == FULL else f", {show(row[f'{name}_over_full'])}"
            return f"{row[name]['mean']:.4f}{over}"

        parts.append(f"{title}, and its distance from the full planner's [95 %]")
        parts.append(pivot(result["rows"], "variant", "budget_bits", cell, "variant"))
    return "\n\n".join(parts)
