"""Every allocation at the same total bytes: which one loses least against the unquantized model?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pw.errors import BudgetError
from pw.evaluation.baselines.controls import frequency_damage, shuffled
from pw.evaluation.baselines.static import exact, hull
from pw.evaluation.baselines.tokenwise import fit_choosers, tokenwise
from pw.evaluation.baselines.uniform import stepped, uniform
from pw.evaluation.lab.model import Bits
from pw.evaluation.lab.planned import ProductPlanner
from pw.evaluation.lab.room import BUDGETS, Room
from pw.evaluation.lab.studies.common import Row, compared, markdown, show, size
from pw.evaluation.lab.texts import read_documents, spread_windows

PRODUCT = "PagedWeight, static start"
UNIFORM = "uniform (APL), blind steps"
MAIN = (PRODUCT, UNIFORM, "GEMQ, exact ILP", "MxMoE, exact ILP per layer")

_LOW_SHARE = 0.5  # of tokens that take the narrower width in DP-LLM
_FIT_WINDOWS = 8  # of calibration text for its thresholds


def run(room: Room) -> dict[str, Any]:
    """Score all methods at all budgets."""
    rows = []
    for mean in BUDGETS:
        budget = room.budget(mean)
        step = stepped(room.costs, room.model.widths, budget)
        for method, bits in allocations(room, budget):
            row = {"budget_bits": mean, "method": method, **size(room, bits)}
            row |= measured(room, bits, step, other=method in MAIN)
            rows.append(row)
    rows += [tokenwise_row(room, bits) for bits in (3, 4)]
    return {"rows": rows, "dense": _dense(room)}


def allocations(room: Room, budget: int) -> Iterator[tuple[str, Bits]]:
    """Method and widths [n] of each opponent, the product's first."""
    widths, costs = room.model.widths, room.costs

    def ilp(damage: Any, *, layers: bool = False) -> Bits:
        return exact(damage, costs, widths, budget, room.layer_of if layers else None)

    planner = ProductPlanner(room.model, room.model.artifact, costs)
    chosen = planner.bits(budget)
    yield PRODUCT, chosen
    yield UNIFORM, stepped(costs, widths, budget)
    makers: list[tuple[str, Callable[[], Bits]]] = [
        ("GEMQ, exact ILP", lambda: ilp(room.flat("gemq"))),
        ("MxMoE, exact ILP per layer", lambda: ilp(room.flat("output"), layers=True)),
        ("token-wise (g.dWx)^2, exact ILP", lambda: ilp(room.flat("token"))),
        ("GEMQ, hull", lambda: hull(room.flat("gemq"), costs, widths, budget)),
        ("element-wise Fisher, exact ILP", lambda: ilp(room.flat("fisher"))),
        ("hessian (the paper's), exact ILP", lambda: ilp(room.flat("hessian"))),
        ("layer output error, exact ILP over all layers", lambda: ilp(room.flat("output"))),
        (
            "routing frequency alone",
            lambda: ilp(frequency_damage(room.model.geometry, room.scores["mass"], widths)),
        ),
        ("PagedWeight's widths shuffled", lambda: shuffled(chosen, 0)),
    ]
    for name, make in makers:
        try:
            yield name, make()
        except BudgetError:
            continue  # MxMoE's equal shares cannot always be met


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
