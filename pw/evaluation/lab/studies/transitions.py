"""Does predicted damage rank blocks as the model does? Measured divergence of single blocks.

Each block of every second expert goes alone from unquantized to 2 or 3 bits; the divergence from
the unquantized model is measured on prose and on key-value prompts. Scores come from the mixed
calibration text; routing and residuals from the text at hand.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy.stats import pearsonr, spearmanr
from torch import Tensor

from pw.blocks import MODULES
from pw.config import PlannerConfig
from pw.evaluation.lab.groups import group_windows
from pw.evaluation.lab.lab import Lab
from pw.evaluation.lab.model import Bits, Memo
from pw.evaluation.lab.planned import ProductPlanner
from pw.evaluation.lab.probe import Floats, Prober, Prompt
from pw.evaluation.lab.room import Room
from pw.evaluation.lab.studies.common import markdown
from pw.planning.residual import merge

_WINDOWS, _LENGTH = 3, 1024
_RARE = 1e-3  # share below which a ratio of shares means little
# Text, width from which a block goes (all others stay there; 0 = unquantized), width to which.
CASES = (("prose", 0, 2), ("prose", 0, 3), ("prose", 4, 3), ("key-value", 0, 2))


def run(room: Room) -> dict[str, Any]:
    """Measure all blocks, or read what was measured; correlate."""
    measured, chosen = _measured(room), sample(room)
    prober = Prober(room.model, room.model.artifact, PlannerConfig().residual_clamp)
    rows = []
    for kind, before, after in CASES:
        windows = group_windows(room, kind, _WINDOWS, _LENGTH)
        prompts = [prober.read(window.ids) for window in windows]
        found = np.array(measured[_name(kind, before, after)])
        for predictor, every in predictions(room, prompts, before, after):
            values = every[chosen]
            rank, line = spearmanr(values, found), pearsonr(values, found)
            rows.append(
                {
                    "text": kind,
                    "move": f"{before or 16}->{after}",
                    "predictor": predictor,
                    "spearman": round(float(rank.statistic), 4),
                    "pearson": round(float(line.statistic), 4),
                    "predicted_sum": float(values.sum()),
                    "measured_sum": float(found.sum()),
                }
            )
    return {"rows": rows, "blocks": len(chosen), "tokens": _WINDOWS * _LENGTH}


def sample(room: Room) -> list[int]:
    """Blocks that are measured: both modules of every second expert, odd and even by turns."""
    keys = list(room.model.geometry.keys())
    slot = room.model.geometry.slot
    return [i for i, key in enumerate(keys) if (key.expert + slot(key.layer)) % 2 == 0]


def predictions(
    room: Room, prompts: list[Prompt], before: int, after: int
) -> Iterator[tuple[str, Floats]]:
    """Name and damage [n] of one move of every block, by each way to predict it."""
    widths = room.model.widths
    planner = ProductPlanner(room.model, room.model.artifact, room.costs)
    stats = planner.new_stats()
    for prompt in prompts:
        stats.update(prompt.mass, prompt.tokens)
    learned = merge([p.learned for p in prompts if p.learned is not None], [1.0] * len(prompts))
    exact = merge([prompt.exact for prompt in prompts], [1.0] * len(prompts))

    def move(scores: Floats) -> Floats:
        start = scores[:, before - widths[0]] if before else 0.0
        return np.maximum(scores[:, after - widths[0]] - start, 0.0)

    def cost(name: str) -> Floats:
        return move(room.flat(name))

    bucketed = ProductPlanner(
        room.model,
        room.model.artifact,
        room.costs,
        replace(planner.config, routing_rule="buckets"),
    )

    def product(eta: Floats | None) -> Floats:
        return move(planner.damage.damage(stats.mass(), eta))

    linear, linear_usual = _shares([p.mass for p in prompts]), _shares([room.scores["mass"]])
    square, square_usual = _shares([p.squares for p in prompts]), _shares([room.scores["squares"]])
    yield "hessian", cost("hessian")
    yield "hessian x r", cost("hessian") * linear
    yield "hessian x r^2", cost("hessian") * square
    if exact is not None:
        yield "hessian x r^2 x eta exact", cost("hessian") * square * exact.ravel()
    for name in ("fisher", "gemq", "token"):
        yield name, cost(name)
    by_mass, by_square = (
        (linear + _RARE) / (linear_usual + _RARE),
        (square + _RARE) / (square_usual + _RARE),
    )
    yield "token x r / usual", cost("token") * by_mass
    yield "token x r^2 / usual", cost("token") * by_square
    yield "buckets, eta off", move(bucketed.damage.damage(stats.mass()))
    yield "product, eta off", product(None)
    for name, eta in (("learned", learned), ("exact", exact)):
        if eta is not None:
            yield f"token x eta {name}", cost("token") * eta.ravel()
            yield f"product, eta {name}", product(eta)


def _shares(sums: list[Floats]) -> Floats:
    """Share [n] of its layer's sums that each block's expert has."""
    total = np.sum(sums, axis=0)
    return np.repeat((total / total.sum(1, keepdims=True)).ravel(), len(MODULES))


def _measured(room: Room) -> dict[str, list[float]]:
    """KL of each block's move on each kind of text; kept in the room's memory."""
    kept = room.kept("transitions.json")
    found: dict[str, list[float]] = {}
    if kept is not None and kept.exists():
        found = json.loads(kept.read_text())
    for kind, before, after in CASES:
        name = _name(kind, before, after)
        if name in found:
            continue
        lab = Lab(room.model, group_windows(room, kind, _WINDOWS, _LENGTH))
        base = room.model.uniform(before)
        found[name] = single_moves(lab, base, after, sample(room)).tolist()
        if kept is not None:
            kept.write_text(json.dumps(found) + "\n")
    return found


def _name(kind: str, before: int, after: int) -> str:
    return f"{kind} {before}->{after}"


@torch.no_grad()
def single_moves(lab: Lab, base: Bits, bits: int, blocks: Sequence[int]) -> Floats:
    """Rise of the divergence when one block alone goes to `bits` from the allocation `base`, for
    each of `blocks`.
    """
    lab.prepare()
    model, geometry = lab.model, lab.model.geometry
    rises = np.zeros((len(blocks), len(lab.windows)))
    for place, window in enumerate(lab.windows):
        memo = Memo(slots=len(geometry.layers) - 1)
        model.hold(base)
        _, usual = lab.compare(place, model.logits(window.ids, window.scored - 1, memo))
        for row, block in enumerate(blocks):
            changed = base.copy()
            changed[block] = bits
            model.hold(changed)
            slot = block // (geometry.experts * len(MODULES))
            logits: Tensor = model.logits(window.ids, window.scored - 1, memo, slot)
            rises[row, place] = lab.compare(place, logits)[1] - usual
    return np.asarray(rises.mean(1))


def tables(result: dict[str, Any]) -> str:
    """Markdown: predictors down, texts and moves across."""
    places = sorted({(row["text"], row["move"]) for row in result["rows"]})
    names = list(dict.fromkeys(row["predictor"] for row in result["rows"]))
    value = {(r["predictor"], r["text"], r["move"]): r for r in result["rows"]}
    rows = [
        [name]
        + [
            f"{value[name, *place]['spearman']:.2f} / {value[name, *place]['pearson']:.2f}"
            if (name, *place) in value
            else "-"
            for place in places
        ]
        for name in names
    ]
    return markdown(["predictor", *(f"{text}, {move}" for text, move in places)], rows)
