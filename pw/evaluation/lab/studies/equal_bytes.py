"""Every allocation at the same total bytes: which one loses least against the unquantized model?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pw.errors import BudgetError
from pw.evaluation.baselines.controls import frequency_damage, shuffled
from pw.evaluation.baselines.static import exact, hull
from pw.evaluation.baselines.tokenwise import fit_choosers, tokenwise
from pw.evaluation.baselines.uniform import stepped
from pw.evaluation.lab.cache import CachedLab
from pw.evaluation.lab.damage_scores import Floats
from pw.evaluation.lab.model import Bits
from pw.evaluation.lab.planned import ProductPlanner
from pw.evaluation.lab.room import BUDGETS, Room
from pw.evaluation.lab.studies.common import (
    Row,
    compared,
    interval,
    markdown,
    pivot,
    show,
    size,
)
from pw.evaluation.lab.texts import read_documents, spread_windows

PRODUCT = "PagedWeight, static start"
UNIFORM = "uniform (APL), blind steps"
GEMQ = "GEMQ, exact ILP"
MXMOE = "MxMoE, exact ILP per layer"
MAIN = (PRODUCT, UNIFORM, GEMQ, MXMOE)
FREQUENCY, SHUFFLED = "routing frequency alone", "PagedWeight's widths shuffled"
DP_LLM = "DP-LLM, half of the tokens a bit less"
CONTROLS = (FREQUENCY, SHUFFLED, DP_LLM)
MORE = (
    "token-wise (g.dWx)^2, exact ILP",
    "GEMQ, hull",
    "element-wise Fisher, exact ILP",
    "hessian (the paper's), exact ILP",
    "layer output error, ILP over all layers",
)
FEW_BUDGETS = (3.0,)

_LOW_SHARE = 0.5  # of tokens that take the narrower width in DP-LLM
_FIT_WINDOWS = 8  # of calibration text for its thresholds


def run(room: Room) -> dict[str, Any]:
    """Score the main methods and the controls at all budgets, the others at one of them."""
    rows = []
    for names, budgets in ((MAIN, BUDGETS), (CONTROLS, BUDGETS), (MORE, FEW_BUDGETS)):
        for mean in budgets:
            rows += [{"budget_bits": mean} | row for row in _rows(room, room.budget(mean), names)]
    return {"rows": rows, "dense": _dense(room)}


def _rows(room: Room, budget: int, names: tuple[str, ...]) -> list[Row]:
    """Some methods with the same bytes; the main ones on the other text too."""
    makers, rows = methods(room, budget), []
    step, product = makers[UNIFORM](), makers[PRODUCT]()
    for name in names:
        if name == DP_LLM:
            rows.append({"method": name, **tokenwise_row(room, step, product)})
            continue
        try:
            bits = makers[name]()
        except BudgetError as error:  # MxMoE's equal shares cannot always be met
            rows.append({"method": name, "failed": error.message})
            continue
        row = {"method": name, **size(room, bits)}
        rows.append(row | measured(room, bits, step, product, other=name in MAIN))
    return rows


def methods(room: Room, budget: int) -> dict[str, Callable[[], Bits]]:
    """How each method spends a number of bytes: widths [n]."""
    widths, costs = room.model.widths, room.costs

    def ilp(damage: Floats, *, layers: bool = False) -> Bits:
        return exact(damage, costs, widths, budget, room.layer_of if layers else None)

    def product() -> Bits:
        return ProductPlanner(room.model, room.model.artifact, costs).bits(budget)

    geometry, scores = room.model.geometry, room.flat
    return {
        PRODUCT: product,
        UNIFORM: lambda: stepped(costs, widths, budget),
        GEMQ: lambda: ilp(scores("gemq")),
        MXMOE: lambda: ilp(scores("output"), layers=True),
        "token-wise (g.dWx)^2, exact ILP": lambda: ilp(scores("token")),
        "GEMQ, hull": lambda: hull(scores("gemq"), costs, widths, budget),
        "element-wise Fisher, exact ILP": lambda: ilp(scores("fisher")),
        "hessian (the paper's), exact ILP": lambda: ilp(scores("hessian")),
        "layer output error, ILP over all layers": lambda: ilp(scores("output")),
        FREQUENCY: lambda: ilp(frequency_damage(geometry, room.scores["mass"], widths)),
        SHUFFLED: lambda: shuffled(product(), 0),
    }


def measured(room: Room, bits: Bits, step: Bits, product: Bits, *, other: bool) -> Row:
    """Scores of one allocation beside blind steps and the product's plan of the same bytes."""
    row = _beside(room.heldout, bits, step, product)
    if other and room.other is not None:
        row["other"] = _beside(room.other, bits, step, product)
    return row


def _beside(lab: CachedLab, bits: Bits, step: Bits, product: Bits) -> Row:
    scores = lab.score(bits)
    row = compared(scores, lab.dense, lab.score(step))
    row["product_over_it"] = interval(lab.score(product).nll, scores.nll)
    return row


def tokenwise_row(room: Room, high: Bits, product: Bits) -> Row:
    """DP-LLM with the widths `high` [n] resident: half of the tokens take one bit less."""
    model = room.model
    low = np.maximum(high - 1, model.widths[0])
    documents = read_documents(room.texts.calibration)
    windows = spread_windows(documents, room.tokenizer, 1024, _FIT_WINDOWS)
    choosers = fit_choosers(model, low, high, _LOW_SHARE, windows)
    lab = room.heldout.lab
    lab.prepare()
    with tokenwise(model, choosers) as experts:
        scores = lab.score(high)
        tokens, wide = experts.tokens.tolist()
    row = size(room, high) | {"share_wide": round(wide / tokens, 3)}
    row |= compared(scores, room.heldout.dense, room.heldout.score(high))
    row["product_over_it"] = interval(room.heldout.score(product).nll, scores.nll)
    return row


def _dense(room: Room) -> Row:
    found = {"heldout": round(room.heldout.dense.perplexity, 4)}
    if room.other is not None:
        found["other"] = round(room.other.dense.perplexity, 4)
    return found


def tables(result: dict[str, Any]) -> str:
    """Markdown: loss, and the product's distance from each method, at every budget; then the rest.

    Methods that were scored at one budget alone come last.
    """
    many = [row for row in result["rows"] if row["method"] in (*MAIN, *CONTROLS)]
    few = [row for row in result["rows"] if row["method"] in MORE]
    other = [row for row in many if "other" in row]
    parts = [
        "NLL over BF16 (share of the blind steps' loss won back; KL)",
        pivot(many, "method", "budget_bits", _loss, "method"),
        "NLL of PagedWeight over the method's [95 %]",
        pivot(many, "method", "budget_bits", lambda row: show(row["product_over_it"]), "method"),
    ]
    if other:
        parts += [
            "The same on the other text",
            pivot(
                other,
                "method",
                "budget_bits",
                lambda row: show(row["other"]["product_over_it"]),
                "method",
            ),
        ]
    head = ("bits", "method", "NLL over BF16 (won back; KL)", "PagedWeight over it [95 %]")
    rows = [
        (f"{row['budget_bits']:g}", row["method"], _loss(row), show(row["product_over_it"]))
        for row in few
        if "failed" not in row
    ]
    return "\n\n".join([*parts, "Other scores", markdown(head, rows)])


def _loss(row: Row) -> str:
    won = "-" if row["won_back"] is None else f"{100 * row['won_back']:.0f} %"
    return f"{row['nll']['mean']:+.4f} ({won}; {row['kl']['mean']:.4f})"
