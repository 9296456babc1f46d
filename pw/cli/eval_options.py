"""Groups of options that only `pw eval` has."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pw.cli.folders import check_folder
from pw.cli.options import option
from pw.errors import ConfigError

if TYPE_CHECKING:
    from pw.evaluation.task_runs import TaskSettings


_text = partial(option, "Text")
_compare = partial(option, "Comparison")
_tasks = partial(option, "Tasks")
_output = partial(option, "Output")


@dataclass(frozen=True)
class TextOptions:
    """Which text is scored."""

    text: Annotated[
        str, _text("A .txt, a .jsonl with `text`, or `bundled` (held-out).", metavar="FILE")
    ] = "bundled"
    seqlen: Annotated[int, _text("Tokens of a chunk, each a context of its own.")] = 2048
    max_chunks: Annotated[int | None, _text("Chunks at most.")] = None
    concurrency: Annotated[
        int, _text("Chunks or prompts scored at a time.", "--concurrency", "--batch-size")
    ] = 4

    def check(self) -> None:
        """Refuse counts that are none.

        Raises:
            ConfigError: One is below 1.
        """
        for name in ("max_chunks", "concurrency"):
            value = getattr(self, name)
            if value is not None and value < 1:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} must be at least 1: {value}")
        if self.seqlen < 2:
            raise ConfigError(f"a chunk needs at least 2 tokens: {self.seqlen}")


@dataclass(frozen=True)
class ComparisonOptions:
    """Which policies are held against each other."""

    policies: Annotated[
        str | None,
        _compare(
            "Policies beside each other, like `dense,static:2..6,static:<file>,adaptive` "
            "(default: the one of --precision-policy).",
            metavar="LIST",
        ),
    ] = None
    memory_budgets: Annotated[
        str | None,
        _compare(
            "Budgets for policies that adapt: sizes, or fixed policies whose bytes count, like "
            "`24MiB,static:3`.",
            metavar="LIST",
        ),
    ] = None
    reference: Annotated[
        str | None,
        _compare(
            "The policy that all are compared with, paired by chunk (default: dense, or the first "
            "fixed one).",
            metavar="POLICY",
        ),
    ] = None
    kl: Annotated[
        bool, _compare("Divergence from dense, where dense is one of the policies.", "--kl/--no-kl")
    ] = True
    baseline: Annotated[
        Path | None, _compare("An earlier report.json to compare with, chunk by chunk.")
    ] = None


@dataclass(frozen=True)
class TaskOptions:
    """Which tasks are asked, and how."""

    tasks: Annotated[
        str | None,
        _tasks(
            "JSONL files with `prompt` and `choices` + `answer` or `target` (see docs/"
            "evaluation.md), or comparison, sequence, tracking (bundled); comma-separated.",
            metavar="LIST",
        ),
    ] = None
    num_fewshot: Annotated[int, _tasks("Examples before each question.")] = 0
    limit: Annotated[float | None, _tasks("Items of each task at most; below 1 a share.")] = None
    generate: Annotated[
        bool, _tasks("Let answers be written too, and compared with `target`.", "--generate")
    ] = False
    max_gen_tokens: Annotated[int, _tasks("Tokens of a written answer at most.")] = 32
    apply_chat_template: Annotated[
        bool, _tasks("Ask in the model's chat template.", "--apply-chat-template")
    ] = False
    lm_eval_tasks: Annotated[
        str | None,
        _tasks(
            "YAML files of lm-evaluation-harness with local data; comma-separated. They may run "
            "Python code of their own. Needs the extra `eval`.",
            metavar="LIST",
        ),
    ] = None
    log_samples: Annotated[
        bool, _tasks("Keep every prompt and score: samples-*.jsonl in --output.", "--log-samples")
    ] = False

    def settings(self, seed: int) -> TaskSettings:
        """How tasks are asked.

        Raises:
            ConfigError: A count is none.
        """
        if self.num_fewshot < 0:
            raise ConfigError(f"--num-fewshot must not be negative: {self.num_fewshot}")
        if self.max_gen_tokens < 1:
            raise ConfigError(f"--max-gen-tokens must be at least 1: {self.max_gen_tokens}")
        from pw.evaluation.task_runs import TaskSettings

        return TaskSettings(
            num_fewshot=self.num_fewshot,
            limit=self.limit,
            seed=seed,
            generate=self.generate,
            max_gen_tokens=self.max_gen_tokens,
            apply_chat_template=self.apply_chat_template,
        )

    @property
    def names(self) -> list[str]:
        """Tasks of `--tasks`."""
        names = (name.strip() for name in (self.tasks or "").split(","))
        return [name for name in names if name]

    @property
    def harness_files(self) -> list[Path]:
        """Files of `--lm-eval-tasks`.

        Raises:
            ConfigError: lm-evaluation-harness is not installed.
        """
        if self.lm_eval_tasks is None:
            return []
        _require("lm_eval", "--lm-eval-tasks", "eval")
        return [Path(name.strip()) for name in self.lm_eval_tasks.split(",")]


@dataclass(frozen=True)
class ReportOptions:
    """What is left on disk."""

    output: Annotated[
        Path | None,
        _output(
            "Folder for report.html, report.md, report.json and pictures. Needs the extra `plot`.",
            "--output",
            "--output-path",
            "-o",
        ),
    ] = None
    trace: Annotated[
        Path | None,
        _output("A --precision-trace of a server, drawn over its steps in the report."),
    ] = None

    def check(self, log_samples: bool) -> None:
        """Refuse before the work what would fail after it.

        Raises:
            ConfigError: A library is missing, or a flag needs `--output`.
        """
        if self.output is None:
            for flag, given in (
                ("--trace", self.trace is not None),
                ("--log-samples", log_samples),
            ):
                if given:
                    raise ConfigError(f"{flag} has nowhere to go", "name a folder with --output")
            return
        _require("matplotlib", "--output", "plot")
        check_folder(self.output, "--output")


def _require(module: str, flag: str, extra: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ConfigError(
            f"{flag} needs {module}, which is not installed",
            f"pip install 'pagedweight[{extra}]'",
        )
