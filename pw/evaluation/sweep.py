"""Scores policies beside each other: the same text and tasks, fixed policies once, others at every
memory budget, each with its divergence from the dense model where that is one of them.

A fixed policy gives the same log-probabilities at every budget in which it fits, so it is run once,
without a limit, and every budget is held against the bytes that it took.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol

from pw.config import PrecisionPolicy
from pw.errors import BudgetError, RequestError
from pw.evaluation.bootstrap import Interval, paired_interval
from pw.evaluation.divergence import Reference
from pw.evaluation.inflight import ScoringEngine
from pw.evaluation.perplexity import PerplexityReport, perplexity
from pw.evaluation.policies import DENSE, Budget, is_fixed
from pw.evaluation.task_runs import HarnessResult, Questions, TaskResult, run_task

Stage = Callable[[str, int, str], AbstractContextManager[Callable[[int], None]]]


class Engine(ScoringEngine, Protocol):
    """What a sweep needs of an engine."""

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together at most."""

    def close(self) -> None:
        """Give up what the engine holds open."""


@dataclass(frozen=True)
class Job:
    """What every policy is asked."""

    chunks: Sequence[list[int]]
    prefix: Sequence[int]  # tokens before each chunk and prompt that are not scored
    tasks: Sequence[Questions] = ()
    concurrency: int = 4  # chunks or prompts in flight at a time
    kl: bool = True  # divergence from dense, where dense is one of the policies


@dataclass(frozen=True)
class Rival:
    """Another policy, and what a row has more than it; negative = the row is better."""

    policy: str
    nll: Interval  # paired by chunk, nats a token
    kl: Interval | None = None  # of the divergence from dense, likewise


@dataclass(frozen=True)
class Row:
    """One policy at one budget."""

    policy: str
    fixed: bool  # its widths do not depend on the budget
    budget: Budget | None  # None: no limit
    budget_bytes: int | None
    error: str | None = None  # why it could not run; then nothing below is set
    report: PerplexityReport | None = None
    tasks: tuple[TaskResult, ...] = ()
    harness: tuple[HarnessResult, ...] = ()
    reference: Rival | None = None  # the policy that all are compared with
    rival: Rival | None = None  # the best fixed policy that fits into the same budget
    task_differences: dict[str, dict[str, Interval]] = field(default_factory=dict)


@dataclass(frozen=True)
class Sweep:
    """All rows of an evaluation, fixed policies first."""

    rows: tuple[Row, ...]
    reference: str
    budgets: dict[str, int]  # name -> bytes


class Sweeper:
    """Runs a job under policies and budgets.

    Args:
        make_engine: An engine for a policy and a budget in bytes (None: no limit).
        job: What each is asked.
        stage: Opens a progress display: name, total, unit; gives a function to call with the
            number of units done.
        harness: Runs the tasks of lm-evaluation-harness on an engine.
    """

    def __init__(
        self,
        make_engine: Callable[[PrecisionPolicy, int | None], Engine],
        job: Job,
        stage: Stage,
        harness: Callable[[Engine], Sequence[HarnessResult]] = lambda _engine: (),
    ) -> None:
        self._make_engine, self._job, self._stage = make_engine, job, stage
        self._harness = harness

    def run(
        self,
        policies: Sequence[PrecisionPolicy],
        budgets: Sequence[Budget],
        reference: PrecisionPolicy,
    ) -> Sweep:
        """Score every fixed policy once and every other one at each budget.

        Args:
            policies: What is compared. A policy that only a budget names is scored too.
            budgets: Empty: one run without a limit.
            reference: The policy whose losses all others are compared with.

        Raises:
            PwError: A fixed policy cannot be run at all, or an engine failed.
        """
        fixed = [policy for policy in policies if is_fixed(policy)]
        fixed += [b.policy for b in budgets if b.policy is not None and b.policy not in fixed]
        fixed.sort(key=lambda policy: policy.kind != DENSE)  # the divergence needs it first
        others = [policy for policy in policies if not is_fixed(policy)]
        dense = fixed[:1] if self._job.kl and fixed and fixed[0].kind == DENSE else []
        rows: list[Row] = []
        count = len(self._job.chunks[0]) - max(len(self._job.prefix), 1)
        with Reference(len(self._job.chunks), count) as kept:
            for policy in fixed:
                kl = kept if dense else None
                rows.append(self._row(policy, None, None, kl))
            sizes = {budget.name: _bytes_of(budget, rows) for budget in budgets}
            for policy in others:
                for budget in budgets or (None,):
                    size = None if budget is None else sizes[budget.name]
                    rows.append(self._row(policy, budget, size, kept if dense else None))
        return Sweep(_compared(rows, str(reference)), str(reference), sizes)

    def _row(
        self,
        policy: PrecisionPolicy,
        budget: Budget | None,
        budget_bytes: int | None,
        kl: Reference | None,
    ) -> Row:
        row = Row(str(policy), is_fixed(policy), budget, budget_bytes)
        name = str(policy) if budget is None else f"{policy} in {budget.name}"
        try:
            engine = self._make_engine(policy, budget_bytes)
            try:
                return self._scored(row, engine, name, kl, policy.kind == DENSE)
            finally:
                engine.close()
        except (BudgetError, RequestError) as error:
            if row.fixed:  # without a limit: it will never fit
                raise
            return replace(row, error=error.message)

    def _scored(
        self, row: Row, engine: Engine, name: str, kl: Reference | None, is_dense: bool
    ) -> Row:
        job = self._job
        with self._stage(name, len(job.chunks), "chunks") as advance:
            report = perplexity(
                engine,
                job.chunks,
                prefix=len(job.prefix),
                concurrency=job.concurrency,
                advance=advance,
                reference=kl,
                is_reference=is_dense,
            )
        tasks = []
        for asked in job.tasks:
            with self._stage(f"{name}, {asked.task.name}", len(asked.items), "items") as advance:
                tasks.append(run_task(engine, asked, concurrency=job.concurrency, advance=advance))
        return replace(row, report=report, tasks=tuple(tasks), harness=tuple(self._harness(engine)))


def _bytes_of(budget: Budget, rows: Sequence[Row]) -> int:
    """Bytes of a budget; of a policy, what its run took at most."""
    if budget.bytes is not None:
        return budget.bytes
    report = next(row.report for row in rows if row.policy == str(budget.policy))
    assert report is not None
    return report.usage.used_peak


def _compared(rows: Sequence[Row], reference: str) -> tuple[Row, ...]:
    """The rows with their differences from the reference and from their rivals."""
    base = next((row for row in rows if row.policy == reference and row.report), None)
    return tuple(_compare(row, rows, base) for row in rows)


def _compare(row: Row, rows: Sequence[Row], base: Row | None) -> Row:
    if row.report is None:
        return row
    if base is not None and base is not row:
        row = replace(row, reference=_against(row, base), task_differences=_tasks(row, base))
    if row.fixed or row.budget_bytes is None:
        return row
    fitting = [
        other
        for other in rows
        if other.fixed and other.report and other.report.usage.used_peak <= row.budget_bytes
    ]
    if not fitting:
        return row
    best = min(fitting, key=lambda other: other.report.nll.mean if other.report else 0.0)
    return replace(row, rival=_against(row, best))


def _against(row: Row, other: Row) -> Rival:
    assert row.report is not None
    assert other.report is not None
    kl, other_kl = row.report.chunk_kl, other.report.chunk_kl
    return Rival(
        other.policy,
        paired_interval(row.report.chunk_nll, other.report.chunk_nll),
        None if kl is None or other_kl is None else paired_interval(kl, other_kl),
    )


def _tasks(row: Row, base: Row) -> dict[str, dict[str, Interval]]:
    """Per task and metric: the row minus the base, paired by item."""
    return {
        mine.task: {
            metric: paired_interval(mine.values[metric], theirs.values[metric])
            for metric in mine.metrics
        }
        for mine, theirs in zip(row.tasks, base.tasks, strict=True)
    }
