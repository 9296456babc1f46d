"""Memory that changes while requests run: adaptive widths, uniform steps, fixed widths, dense.

Two bursts of requests with a trickle between. The arena holds the load's KV at its peak beside
weights of 2.4 bits; unquantized weights leave room for a part of it. All policies get the same
arena and the same load. Quality is teacher-forced on the realised timeline: the held-out windows,
in order, get the widths of equal parts of the tokens made. A prefill counts as one step, however
long, which is kind to policies that preempt.
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
from pw.evaluation.lab.model import UNQUANTIZED, Bits
from pw.evaluation.lab.planned import ProductPlanner
from pw.evaluation.lab.room import Room
from pw.evaluation.lab.studies.common import Row, interval, markdown, show
from pw.memory.budget import layouts_of
from pw.memory.kv_layout import token_bytes

_RUNNING = 8  # requests at a time
_PEAK_BITS = 2.4  # mean bits for which the arena has room at the peak of the load
_KV_OF_DENSE = 1.6  # KV of so many longest contexts, in units of the unquantized experts
_AHEAD = 32  # steps whose KV pages count as needed
ADAPTIVE, STEPS = "adaptive (PagedWeight)", "uniform steps"


def run(room: Room) -> dict[str, Any]:
    """Serve the load with every policy; score the timelines."""
    place = _Place(room)
    outcomes: dict[str, tuple[Outcome, Weights]] = {}
    for name, weights in place.policies():
        arena = Arena(place.pages, place.kv_pages, weights, _RUNNING, _AHEAD)
        outcomes[name] = arena.serve(place.load), weights
    rows, lab = [], room.heldout
    steps = lab.score(outcomes[STEPS][0].allocations(len(lab.lab.windows)))
    for name, (outcome, weights) in outcomes.items():
        timeline = outcome.allocations(len(lab.lab.windows))
        scores = lab.score(timeline)
        row: Row = {
            "policy": name,
            "nll": interval(scores.nll, lab.dense.nll),
            "nll_over_steps": interval(scores.nll, steps.nll),
            "kl": interval(scores.kl),
            "kl_over_steps": interval(scores.kl, steps.kl),
            **_work(outcome),
        }
        if timeline[0][0] != UNQUANTIZED:
            means = [mean_bits(room.model.geometry, bits) for bits in timeline]
            row["mean_bits"] = round(float(np.mean(means)), 3)
            row["least_bits"] = round(min(means), 3)
        if isinstance(weights, MovingWeights):
            row |= {
                "moved_mb": round(weights.moved_bytes / 1e6, 1),
                "reductions": weights.reductions,
                "flaps": weights.flaps,
            }
        rows.append(row)
    return {"rows": rows, "pages": place.pages, "page_bytes": place.page_bytes}


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

    def __init__(self, room: Room) -> None:
        self._room, model = room, room.model
        kv, dtype, widths = model.checkpoint.kv, model.checkpoint.weight_dtype, model.widths
        layouts = layouts_of(model.geometry, kv, dtype, (widths[0], widths[-1]))
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
        room_at_peak = np.interp(_PEAK_BITS, np.array(widths), self.totals) + most
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

        peak = int(np.interp(_PEAK_BITS, np.array(model.widths), self.costs.sum(0)))
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
        "policy", "mean bits (least)", "NLL over BF16 [95 %]", "NLL over uniform steps [95 %]",
        "KL", "steps a request", "preempted", "recomputed tokens", "MB copied", "reductions",
    )  # fmt: skip
    rows = [
        (
            row["policy"],
            f"{row['mean_bits']:.2f} ({row['least_bits']:.2f})" if "mean_bits" in row else "16",
            show(row["nll"]), show(row["nll_over_steps"]), f"{row['kl']['mean']:.4f}",
            row["mean_delay_steps"], row["preemptions"], row["recomputed_tokens"],
            row.get("moved_mb", "-"), row.get("reductions", "-"),
        )
        for row in result["rows"]
    ]  # fmt: skip
    return markdown(head, rows)
