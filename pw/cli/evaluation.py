"""The command that scores policies: perplexity, divergence, tasks, all bytes by class."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pw.cli.command import print_json
from pw.cli.eval_options import ComparisonOptions, ReportOptions, TaskOptions, TextOptions
from pw.cli.locate import artifact_path
from pw.cli.options import Common, Planner, Runtime
from pw.cli.precheck import check_context, check_settings
from pw.cli.stages import progress_of
from pw.config import EngineConfig, PrecisionPolicy, format_bytes, parse_memory
from pw.errors import BudgetError, ConfigError

if TYPE_CHECKING:
    from pw.evaluation.policies import Budget
    from pw.evaluation.sweep import Engine, Job, Sweep
    from pw.evaluation.task_runs import HarnessResult, TaskSettings
    from pw.models.tokenizer import Tokenizer

ModelName = Annotated[
    str, typer.Argument(metavar="MODEL", help="An artifact (see `pw calibrate`), or `tiny`.")
]


@dataclass(frozen=True)
class Compared:
    """Policies, the budgets of those that adapt, and the one that all are compared with."""

    policies: tuple[PrecisionPolicy, ...]
    budgets: tuple[Budget, ...]
    reference: PrecisionPolicy
    unlimited: EngineConfig  # how engines run that no budget governs


def evaluate(
    model: ModelName,
    text: TextOptions,
    comparison: ComparisonOptions,
    tasks: TaskOptions,
    report: ReportOptions,
    runtime: Runtime,
    planner: Planner,
    common: Common,
) -> None:
    """Perplexity, divergence and tasks under one or more precision policies, with all bytes."""
    text.check()
    report.check(tasks.log_samples)
    compared = compare(runtime.config(planner), comparison)
    harness_files = tasks.harness_files
    baseline = None if comparison.baseline is None else _read_baseline(comparison.baseline)
    path = artifact_path(model, quiet=common.quiet)

    sweep, described = run_evaluation(
        path, compared, text, common, tasks=tasks, kl=comparison.kl, harness_files=harness_files
    )
    if baseline is not None:
        _add_baseline(described, baseline)
    if common.json:
        print_json(described)
    else:
        print_report(described)
    if report.output is not None:  # what it cannot write has been told
        _write(report, described, sweep if tasks.log_samples else None, path)
        if not common.json:
            print(f"report: `{report.output / 'report.html'}`")
    if all(row["error"] for row in described["rows"]):
        raise BudgetError("no policy could run", "raise --memory-budgets")


def run_evaluation(
    path: Path,
    compared: Compared,
    text: TextOptions,
    common: Common,
    *,
    tasks: TaskOptions | None = None,
    kl: bool = True,
    harness_files: Sequence[Path] = (),
) -> tuple[Sweep, dict[str, Any]]:
    """Score an artifact; the sweep and its description (see `pw.evaluation.report.document`)."""
    from pw.engine import Engine
    from pw.evaluation.report.document import document
    from pw.evaluation.report.provenance import provenance, sha256_of
    from pw.evaluation.sweep import Sweeper
    from pw.models.tokenizer import load_tokenizer

    tasks = tasks or TaskOptions()
    config = compared.unlimited
    seed = config.seed or 0
    tokenizer, whole = load_tokenizer(path), read_text(text.text)
    job = _job(tokenizer, whole, text, tasks, seed, kl)
    bounds = _bounds(path, config, job, open_ended=bool(harness_files))

    def make_engine(policy: PrecisionPolicy, budget: int | None) -> Engine:
        limits = bounds if budget is None else bounds | {"memory_budget": budget}
        settings = replace(config, policy=policy, **limits)
        check_settings(path, settings)
        engine = Engine.from_artifact(path, settings)
        check_context(config.max_model_len, engine.status())
        return engine

    harness = _harness(harness_files, tokenizer, tasks.settings(seed), job)
    sweeper = Sweeper(make_engine, job, progress_of(common).stage, harness)
    sweep = sweeper.run(compared.policies, compared.budgets, compared.reference)
    origin = provenance(sys.argv[1:], path, config.device, {"bootstrap": 0, "few-shot": seed})
    about = {"name": text.text, "sha256": sha256_of(whole)}
    return sweep, document(sweep, job, about, origin)


def _job(
    tokenizer: Tokenizer, whole: str, text: TextOptions, tasks: TaskOptions, seed: int, kl: bool
) -> Job:
    """What every policy is asked: chunks of the text, questions of the tasks."""
    from pw.evaluation.perplexity import cut_chunks
    from pw.evaluation.sweep import Job
    from pw.evaluation.task_runs import prepare
    from pw.evaluation.tasks import load_task
    from pw_pipelines.calibration import bos_prefix

    prefix = bos_prefix(tokenizer)
    ids = tokenizer.encode(whole, add_special_tokens=False)
    chunks = cut_chunks(ids, text.seqlen, prefix=prefix, limit=text.max_chunks)
    settings = tasks.settings(seed)
    asked = [prepare(load_task(name), tokenizer, settings, prefix) for name in tasks.names]
    return Job(chunks, prefix, asked, text.concurrency, kl)


def _bounds(path: Path, config: EngineConfig, job: Job, *, open_ended: bool) -> dict[str, Any]:
    """Limits of every engine: no more sequences and no longer ones than the job has.

    Tables and scratch grow with both, and would count where bytes are compared.
    """
    from pw.models.checkpoint import Checkpoint

    bounds = {"max_num_seqs": min(config.max_num_seqs, job.concurrency)}
    if not open_ended and config.max_model_len is None:
        stated = int(Checkpoint.open(path).architecture.config.max_position_embeddings)
        longest = max((asked.longest for asked in job.tasks), default=0)
        bounds["max_model_len"] = max(len(job.chunks[0]), min(longest, stated))
    return bounds


def compare(config: EngineConfig, options: ComparisonOptions) -> Compared:
    """What the flags compare.

    Raises:
        ConfigError: They contradict each other.
    """
    from pw.evaluation.policies import Budget, choose_reference, is_fixed, parse_budgets
    from pw.evaluation.policies import parse_policies as parse

    policies = (config.policy,) if options.policies is None else parse(options.policies)
    reference = choose_reference(policies, options.reference)
    adapting = [policy for policy in policies if not is_fixed(policy)]
    budgets: tuple[Budget, ...] = ()
    if options.memory_budgets is not None:
        budgets = parse_budgets(options.memory_budgets)
        for budget in budgets:
            if budget.policy is None:
                parse_memory("--memory-budgets", budget.name)
        config = replace(config, memory_budget=None)
    elif options.policies is not None and config.memory_budget is not None:
        budgets = (Budget(format_bytes(config.memory_budget), config.memory_budget),)
        config = replace(config, memory_budget=None)
    if config.trace is not None and len(adapting) * max(len(budgets), 1) != 1:
        raise ConfigError(
            f"--precision-trace is for one run that adapts: there are "
            f"{len(adapting) * max(len(budgets), 1)}",
            "name one adaptive policy and one budget",
        )
    return Compared(policies, budgets, reference, config)


@contextmanager
def _offline() -> Iterator[None]:
    """Import what is imported here as a library without a network: nothing may be downloaded."""
    names = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _harness(
    files: Sequence[Path], tokenizer: Tokenizer, settings: TaskSettings, job: Job
) -> Callable[[Engine], Sequence[HarnessResult]]:
    """What runs the tasks of lm-evaluation-harness on an engine."""
    if not files:
        return lambda _engine: ()
    with _offline():
        from pw.evaluation.harness import check_files, run_harness
    check_files(files)
    return lambda engine: run_harness(
        engine, tokenizer, files, settings, prefix=job.prefix, concurrency=job.concurrency
    )


def read_text(name: str) -> str:
    """The text to score: documents joined by a blank line."""
    from pw.models.resolve import asset
    from pw_pipelines.calibration import load_documents

    documents = load_documents(str(asset("heldout.jsonl")) if name == "bundled" else name)
    if not all(isinstance(document, str) for document in documents):
        raise ConfigError(f"perplexity needs plain text, not chats: `{name}`")
    return "\n\n".join(document for document in documents if isinstance(document, str))


def _read_baseline(path: Path) -> list[dict[str, Any]]:
    """Rows of an earlier report that could run."""
    try:
        rows = json.loads(path.read_text("utf-8"))["rows"]
        rows = [row for row in rows if row["error"] is None]
        for row in rows:
            row["chunk_nll"] = [float(value) for value in row["chunk_nll"]]
            row["policy"], row["budget"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"not a report of `pw eval`: `{path}`",
            "save one with `pw eval ... --json > FILE`, or take the report.json of --output",
        ) from error
    return rows


def _add_baseline(described: dict[str, Any], earlier: Sequence[dict[str, Any]]) -> None:
    """Compare every row with the same policy and budget of an earlier report, or its only row."""
    from dataclasses import asdict

    from pw.evaluation.bootstrap import paired_interval

    for row in described["rows"]:
        key = (row["policy"], row["budget"])
        same = [other for other in earlier if (other["policy"], other["budget"]) == key]
        found = same or (earlier if len(earlier) == 1 else [])
        if found and row["error"] is None:
            difference = paired_interval(row["chunk_nll"], found[0]["chunk_nll"])
            row["against_baseline"] = {"policy": found[0]["policy"], "nll": asdict(difference)}


def _write(
    options: ReportOptions, described: dict[str, Any], sweep: Sweep | None, path: Path
) -> None:
    from pw.evaluation.report.write import write_report, write_samples

    assert options.output is not None
    write_report(options.output, described, options.trace, path)
    if sweep is not None:
        write_samples(options.output, sweep)


def print_report(described: dict[str, Any]) -> None:
    """Print what an evaluation found."""
    from pw.evaluation.report.console import print_rows

    print_rows(described)
