"""Memory that changes while requests run: adaptive widths, uniform steps, fixed widths, dense.

Two bursts of requests with a trickle between. The arena holds the load's KV at its peak beside
weights of few bits (three arenas, three widths); unquantized weights leave room for a part of it.
All policies get the same arena and the same load. Quality is teacher-forced on the realised
timeline: the held-out windows, in order, get the widths of equal parts of the tokens made. A
prefill counts as one step, however long, which is kind to policies that preempt.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from pw.config import PlannerConfig
from pw.evaluation.baselines.uniform import uniform
from pw.evaluation.lab.changing_memory import (
    Arena,
    FixedWeights,
    MovingWeights,
    Outcome,
    Request,
    Weights,
)
from pw.evaluation.lab.costs import mean_bits, total_bytes
from pw.evaluation.lab.lab import Scores
from pw.evaluation.lab.model import UNQUANTIZED, Bits
from pw.evaluation.lab.planned import ProductPlanner
from pw.evaluation.lab.room import Room
from pw.evaluation.lab.studies.common import Row, interval, markdown, show
from pw.memory.budget import layouts_of
from pw.memory.kv_layout import token_bytes

_RUNNING = 8  # requests at a time
PEAK_BITS = (2.4, 3.0, 3.5)  # mean bits for which the arena has room at the peak of the load
_KV_OF_DENSE = 1.6  # KV of so many longest contexts, in units of the unquantized experts
_AHEAD = PlannerConfig.forecast_steps  # steps whose KV pages count as needed
ADAPTIVE, STEPS = "adaptive (PagedWeight)", "uniform steps"


def run(room: Room) -> dict[str, Any]:
    """Serve the load with every policy in every arena; score the timelines."""
    rows, arenas = [], []
    for peak in PEAK_BITS:
        place = _Place(room, peak)
        rows += [{"peak_bits": peak} | row for row in _rows(room, place)]
        arenas.append({"peak_bits": peak, "pages": place.pages, "page_bytes": place.page_bytes})
    return {"rows": rows, "arenas": arenas}


def quality(room: Room, timeline: list[Bits], scores: Scores, adaptive: Scores) -> Row:
    """Of the held-out windows at the widths of a timeline: over the unquantized model and over
    `adaptive`; mean bits where there are any.
    """
    row: Row = {
        "nll": interval(scores.nll, room.heldout.dense.nll),
        "nll_over_adaptive": interval(scores.nll, adaptive.nll),
        "kl": interval(scores.kl),
        "kl_over_adaptive": interval(scores.kl, adaptive.kl),
    }
    if timeline[0][0] != UNQUANTIZED:
        means = [mean_bits(room.model.geometry, bits) for bits in timeline]
        row["mean_bits"] = round(float(np.mean(means)), 3)
        row["least_bits"] = round(min(means), 3)
    return row


def _rows(room: Room, place: _Place) -> list[Row]:
    """Every policy in one arena."""
    outcomes: dict[str, tuple[Outcome, Weights]] = {}
    for name, weights in place.policies():
        arena = Arena(place.pages, place.kv_pages, weights, _RUNNING, _AHEAD)
        outcomes[name] = arena.serve(place.load), weights
    lab, parts, rows = room.heldout, len(room.heldout.lab.windows), []
    steps, adaptive = (
        lab.score(outcomes[name][0].allocations(parts)) for name in (STEPS, ADAPTIVE)
    )
    for name, (outcome, weights) in outcomes.items():
        timeline = outcome.allocations(parts)
        scores = lab.score(timeline)
        row: Row = {
            "policy": name,
            "nll_over_steps": interval(scores.nll, steps.nll),
            **quality(room, timeline, scores, adaptive),
            **_work(outcome),
        }
        if isinstance(weights, MovingWeights):
            row |= {
                "moved_mb": round(weights.moved_bytes / 1e6, 1),
                "reductions": weights.reductions,
                "flaps": weights.flaps,
            }
        rows.append(row)
    return rows


def load(longest: int) -> list[Request]:
    """Two bursts of contexts of at most `longest` tokens, a trickle between; always the same."""
    rng, found = np.random.default_rng(0), []
    for start, count in ((0, 20), (5 * longest, 28)):
        for number in range(count):
            prompt = int(rng.integers(longest // 8, longest // 3))
            output = int(rng.integers(longest // 4, longest - prompt))
            found.append(Request(start + number * longest // 32, prompt, output))
    trickle = range(3 * longest, 14 * longest, longest // 2)
    return found + [Request(step, longest // 8, longest // 4) for step in trickle]


class _Place:
    """The load, and the arena that all policies get."""

    def __init__(self, room: Room, peak_bits: float) -> None:
        self._room, self._peak_bits, model = room, peak_bits, room.model
        kv, dtype, widths = model.checkpoint.kv, model.checkpoint.weight_dtype, model.widths
        layouts = layouts_of(
            model.geometry, kv, dtype, (widths[0], widths[-1]), None, model.artifact.table_bytes
        )
        self.page_bytes = layouts[0].page_bytes
        costs = [[lay.resident_pages(b) * lay.page_bytes for b in widths] for lay in layouts]
        self.costs = np.tile(np.array(costs, dtype=np.int64), (model.geometry.blocks // 2, 1))
        self._per_page = [self.page_bytes // token_bytes(layer, dtype) for layer in kv.stored]
        self.totals = self.costs.sum(0) // self.page_bytes  # pages of uniform widths
        wanted = int(_KV_OF_DENSE * room.dense_bytes) // self.page_bytes
        longest = next(n for n in range(32, 1 << 20) if _RUNNING * self.kv_pages(n) > wanted)
        self.load = load(longest)
        nothing = FixedWeights(model.unquantized(), 0)
        most = Arena(1 << 30, self.kv_pages, nothing, _RUNNING, _AHEAD).serve(self.load).most_kv
        room_at_peak = np.interp(self._peak_bits, np.array(widths), self.totals) + most
        self.pages = int(room_at_peak / (1 - PlannerConfig().low_watermark))

    def kv_pages(self, tokens: int) -> int:
        """Pages of a sequence."""
        return sum(-(-tokens // count) for count in self._per_page)

    def policies(self) -> list[tuple[str, Weights]]:
        """Name and weights of each policy."""
        model, config = self._room.model, PlannerConfig()
        planner = ProductPlanner(model, model.artifact, self.costs)
        state = planner.state()
        eager = replace(
            config, dwell_steps=0, high_watermark=config.low_watermark + 1e-6,
            transfer_budget_bytes=1 << 40,
        )  # fmt: skip

        def moving(settings: PlannerConfig, *, steps: bool = False) -> MovingWeights:
            return MovingWeights(state, self.page_bytes, self.pages, settings, uniform=steps)

        def fixed(bits: Bits) -> FixedWeights:
            used = total_bytes(self.costs, model.widths, bits)
            return FixedWeights(bits, used // self.page_bytes)

        peak = int(np.interp(self._peak_bits, np.array(model.widths), self.costs.sum(0)))
        dense = -(-self._room.dense_bytes // self.page_bytes)
        return [
            (ADAPTIVE, moving(config)),
            (STEPS, moving(config, steps=True)),
            ("adaptive without hysteresis", moving(eager)),
            ("no movement: the plan that fits at the peak", fixed(planner.bits(peak))),
            ("static:4", fixed(uniform(model.geometry.blocks, 4))),
            ("dense, preempting", FixedWeights(model.unquantized(), dense)),
        ]


def _work(outcome: Outcome) -> Row:
    work = outcome.prefilled + outcome.recomputed + outcome.made
    return {
        "steps": outcome.steps,
        "preemptions": outcome.preemptions,
        "recomputed_tokens": outcome.recomputed,
        "tokens_of_work": work,
        "mean_delay_steps": round(float(np.mean(outcome.delays))),
    }


def tables(result: dict[str, Any]) -> str:
    """Markdown."""
    head = (
        "bits at the peak", "policy", "mean bits (least)", "NLL over BF16 [95 %]", "KL",
        "KL over adaptive [95 %]", "NLL over adaptive [95 %]", "steps a request", "preempted",
        "recomputed tokens", "MB copied", "reductions",
    )  # fmt: skip
    rows = [
        (
            f"{row['peak_bits']:g}", row["policy"],
            f"{row['mean_bits']:.2f} ({row['least_bits']:.2f})" if "mean_bits" in row else "16",
            show(row["nll"]), f"{row['kl']['mean']:.4f}", show(row["kl_over_adaptive"]),
            show(row["nll_over_adaptive"]), row["mean_delay_steps"], row["preemptions"],
            row["recomputed_tokens"], row.get("moved_mb", "-"), row.get("reductions", "-"),
        )
        for row in result["rows"]
    ]  # fmt: skip
    return markdown(head, rows)
