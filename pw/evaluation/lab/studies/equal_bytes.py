"""Every allocation at the same total bytes: which one loses least against the unquantized model?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pw.errors import BudgetError
from pw.evaluation.baselines.controls import frequency_damage, shuffled
from pw.evaluation.baselines.static import exact, hull
from pw.evaluation.baselines.tokenwise import fit_choosers, tokenwise
from pw.evaluation.baselines.uniform import stepped, uniform
from pw.evaluation.lab.damage_scores import Floats
from pw.evaluation.lab.model import Bits
from pw.evaluation.lab.planned import ProductPlanner
from pw.evaluation.lab.room import BUDGETS, Room
from pw.evaluation.lab.studies.common import Row, compared, markdown, show, size
from pw.evaluation.lab.texts import read_documents, spread_windows

PRODUCT = "PagedWeight, static start"
UNIFORM = "uniform (APL), blind steps"
GEMQ = "GEMQ, exact ILP"
MXMOE = "MxMoE, exact ILP per layer"
MAIN = (PRODUCT, UNIFORM, GEMQ, MXMOE)
ELSEWHERE = (PRODUCT, UNIFORM)  # scored on the other text too
MORE = (
    "token-wise (g.dWx)^2, exact ILP",
    "GEMQ, hull",
    "element-wise Fisher, exact ILP",
    "hessian (the paper's), exact ILP",
    "layer output error, ILP over all layers",
    "routing frequency alone",
    "PagedWeight's widths shuffled",
)
FEW_BUDGETS = (3.0,)

_LOW_SHARE = 0.5  # of tokens that take the narrower width in DP-LLM
_FIT_WINDOWS = 8  # of calibration text for its thresholds


def run(room: Room) -> dict[str, Any]:
    """Score the main methods at all budgets, the others at one of them."""
    rows = []
    for names, budgets in ((MAIN, BUDGETS), (MORE, FEW_BUDGETS)):
        for mean in budgets:
            budget = room.budget(mean)
            step = stepped(room.costs, room.model.widths, budget)
            makers = methods(room, budget)
            for name in names:
                try:
                    bits = makers[name]()
                except BudgetError as error:  # MxMoE's equal shares cannot always be met
                    rows.append({"budget_bits": mean, "method": name, "failed": error.message})
                    continue
                row = {"budget_bits": mean, "method": name, **size(room, bits)}
                rows.append(row | measured(room, bits, step, other=name in ELSEWHERE))
    rows += [tokenwise_row(room, bits) for bits in (3,)]
    return {"rows": rows, "dense": _dense(room)}


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
        "routing frequency alone": lambda: ilp(
            frequency_damage(geometry, room.scores["mass"], widths)
        ),
        "PagedWeight's widths shuffled": lambda: shuffled(product(), 0),
    }


def measured(room: Room, bits: Bits, step: Bits, *, other: bool) -> Row:
    """Scores of one allocation beside blind steps of the same bytes."""
    lab = room.heldout
    row = compared(lab.score(bits), lab.dense, lab.score(step))
    if other and room.other is not None:
        elsewhere = room.other
        found = compared(elsewhere.score(bits), elsewhere.dense, elsewhere.score(step))
        row["other"] = found
    return row


def tokenwise_row(room: Room, mean: int) -> Row:
    """DP-LLM with `mean` bits resident: half of the tokens take one bit less."""
    model = room.model
    high = uniform(model.geometry.blocks, mean)
    documents = read_documents(room.texts.calibration)
    windows = spread_windows(documents, room.tokenizer, 1024, _FIT_WINDOWS)
    choosers = fit_choosers(model, high - 1, high, _LOW_SHARE, windows)
    lab = room.heldout.lab
    lab.prepare()
    with tokenwise(model, choosers) as experts:
        scores = lab.score(high)
        tokens, wide = experts.tokens.tolist()
    row = {"budget_bits": mean, "method": "DP-LLM, half of the tokens a bit less"}
    row |= size(room, high) | {"mean_bits_read": round(mean - 1 + wide / tokens, 3)}
    return row | compared(scores, room.heldout.dense, room.heldout.score(high))


def _dense(room: Room) -> Row:
    found = {"heldout": round(room.heldout.dense.perplexity, 4)}
    if room.other is not None:
        found["other"] = round(room.other.dense.perplexity, 4)
    return found


def tables(result: dict[str, Any]) -> str:
    """Markdown."""
    head = (
        "bits", "method", "bytes %", "ppl", "NLL over BF16 [95 %]", "NLL over uniform [95 %]",
        "won back %", "KL", "KL won back %", "other text: NLL over uniform",
    )  # fmt: skip
    rows = []
    for row in result["rows"]:
        if "failed" in row:
            rows.append((row["budget_bits"], row["method"], row["failed"], *["-"] * 7))
            continue
        won = row["won_back"]
        rows.append(
            (
                row["budget_bits"], row["method"], f"{100 * row['share']:.1f}",
                row["perplexity"], show(row["nll"]), show(row["nll_over_uniform"]),
                "-" if won is None else f"{100 * won:.0f}", f"{row['kl']['mean']:.4f}",
                f"{100 * row['won_back_kl']:.0f}",
                show(row["other"]["nll_over_uniform"]) if "other" in row else "-",
            )
        )  # fmt: skip
    return markdown(head, rows)
