from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from pw.config import PrecisionPolicy
from pw.errors import BudgetError, PwError
from pw.evaluation.perplexity import cut_chunks
from pw.evaluation.policies import Budget, parse_budgets, parse_policies
from pw.evaluation.sweep import Job, Row, Sweep, Sweeper
from support.scoring import UnigramEngine

DENSE = torch.linspace(0, 4, 128)
WAVES = torch.sin(torch.arange(128.0))


class Engines:
    """Engines whose distribution is the further from dense the fewer bits they have."""

    def __init__(self) -> None:
        self.made: list[tuple[str, int | None]] = []
        self.last: UnigramEngine | None = None

    def __call__(self, policy: PrecisionPolicy, budget: int | None) -> UnigramEngine:
        assert self.last is None or self.last.closed  # one engine at a time
        self.made.append((str(policy), budget))
        if policy.kind == "adaptive" and budget is not None and budget < 3000:
            raise BudgetError("too small for anything")
        bits = policy.bits or (None if policy.kind == "dense" else 5)
        noise = 0.0 if bits is None else 0.5**bits
        self.last = UnigramEngine(
            DENSE + noise * WAVES, policy=str(policy), bits=None if bits is None else (bits,)
        )
        return self.last


@contextmanager
def silent(name: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    yield lambda _: None


def sweep(policies: str, budgets: str = "", reference: str = "dense", **job: object) -> Sweep:
    chunks = cut_chunks([(7 * place) % 128 for place in range(64)], 8)
    asked = Job(chunks, [], **job)  # type: ignore[arg-type]
    return Sweeper(Engines(), asked, silent).run(
        parse_policies(policies),
        parse_budgets(budgets) if budgets else (),
        PrecisionPolicy.parse(reference),
    )


def by_name(found: Sweep) -> dict[tuple[str, str | None], Row]:
    return {(row.policy, row.budget.name if row.budget else None): row for row in found.rows}


def test_fixed_policies_run_once_and_others_at_every_budget() -> None:
    engines = Engines()
    job = Job(cut_chunks(range(64), 8), [])
    Sweeper(engines, job, silent).run(
        parse_policies("adaptive,static:3,dense"),
        (Budget("9kB", 9000), *parse_budgets("static:4")),
        PrecisionPolicy("dense"),
    )
    assert engines.made == [
        ("dense", None),  # first: the others diverge from it
        ("static:3", None),
        ("static:4", None),  # only a budget names it
        ("adaptive", 9000),
        ("adaptive", 4400),  # planes of 4 bits and the KV of four chunks in flight
    ]


def test_rows_are_compared_with_the_reference_and_with_the_best_that_fits() -> None:
    rows = by_name(sweep("dense,static:2..6,adaptive", "static:5,static:3"))
    dense = rows["dense", None]
    assert dense.report is not None
    assert dense.reference is dense.report.kl is None
    losses = []
    for bits in range(2, 7):
        row = rows[f"static:{bits}", None]
        assert row.report is not None
        assert row.reference is not None
        assert row.report.kl is not None
        assert row.reference.policy == "dense"
        assert row.reference.nll.mean == pytest.approx(row.report.nll.mean - dense.report.nll.mean)
        losses.append(row.report.kl.mean)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] > 0
    rivals = {name: rows["adaptive", name].rival for name in ("static:5", "static:3")}
    assert {name: rival and rival.policy for name, rival in rivals.items()} == {
        "static:5": best_of(rows, range(2, 6)),
        "static:3": best_of(rows, range(2, 4)),
    }


def best_of(rows: dict[tuple[str, str | None], Row], bits: range) -> str:
    """The fixed policy of these widths with the least loss."""
    losses = {}
    for width in bits:
        report = rows[f"static:{width}", None].report
        assert report is not None
        losses[f"static:{width}"] = report.nll.mean
    return min(losses, key=lambda name: losses[name])


def test_a_budget_that_is_too_small_is_a_row_and_not_the_end() -> None:
    rows = by_name(sweep("static:2,adaptive", "1kB,static:4", reference="static:2"))
    failed = rows["adaptive", "1kB"]
    assert (failed.error, failed.report) == ("too small for anything", None)
    assert rows["adaptive", "static:4"].error is None
    assert rows["adaptive", "static:4"].reference is not None


def test_without_dense_or_with_no_kl_there_is_no_divergence() -> None:
    for found in (
        sweep("static:2,static:3", reference="static:2"),
        sweep("dense,static:2", kl=False),
    ):
        assert all(row.report is not None and row.report.kl is None for row in found.rows)


def test_an_engine_that_fails_ends_the_sweep_and_is_closed() -> None:
    engine = UnigramEngine(fail_on="chunk-1")
    job = Job(cut_chunks(range(64), 8), [])
    with pytest.raises(PwError, match="chunk 1 could not be scored"):
        Sweeper(lambda _policy, _budget: engine, job, silent).run(
            parse_policies("static:4"), (), PrecisionPolicy("static", bits=4)
        )
    assert engine.closed
