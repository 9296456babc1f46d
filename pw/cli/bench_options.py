"""Options of `pw bench`, under the names that users of `vllm bench` and `llama-bench` know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pw.cli.folders import check_folder
from pw.cli.locate import TINY, artifact_path
from pw.cli.options import Common, Planner, Runtime, option
from pw.errors import ConfigError

if TYPE_CHECKING:
    from pw.evaluation.bench.workload import Request, Workload

_workload = partial(option, "Workload")
_result = partial(option, "Result")
_server = partial(option, "Server under test")


def random_seed(seed: int | None) -> int:
    """The seed of random prompts; 0 where none is given.

    Raises:
        ConfigError: It is negative: a request may have such a seed, random prompts cannot.
    """
    if seed is not None and seed < 0:
        raise ConfigError(f"--seed of random prompts must not be negative: {seed}")
    return seed or 0


@dataclass(frozen=True)
class Dataset:
    """Which requests."""

    dataset_name: Annotated[
        str, _workload("random, sharegpt, custom or trace.", "--dataset-name", "--dataset")
    ] = "random"
    dataset_path: Annotated[
        Path | None, _workload("Local file of the others (.json, .jsonl).", metavar="FILE")
    ] = None
    num_prompts: Annotated[int, _workload("Requests.")] = 100
    random_input_len: Annotated[
        int, _workload("Tokens of a random prompt.", "--random-input-len", "--input-len")
    ] = 1024
    random_output_len: Annotated[
        int,
        _workload(
            "Tokens of an answer, where the dataset does not say.",
            "--random-output-len",
            "--output-len",
            "--custom-output-len",
        ),
    ] = 128
    random_range_ratio: Annotated[float, _workload("Share by which random lengths vary.")] = 0.0
    random_prefix_len: Annotated[int, _workload("Tokens that all random prompts begin with.")] = 0
    ignore_eos: Annotated[
        bool, _workload("Make all tokens, whatever the model says.", "--ignore-eos")
    ] = False

    def workload(self, seed: int) -> Workload:
        """The settings; `seed` is one of `random_seed`."""
        from pw.evaluation.bench.workload import Workload

        return Workload(
            dataset=self.dataset_name,
            path=self.dataset_path,
            num_prompts=self.num_prompts,
            input_len=self.random_input_len,
            output_len=self.random_output_len,
            range_ratio=self.random_range_ratio,
            prefix_len=self.random_prefix_len,
            seed=seed,
        )


@dataclass(frozen=True)
class Result:
    """What is told and kept of a run."""

    output: Annotated[
        list[str] | None,
        _result(
            "md (a table; the default), csv or json; or a file whose name ends so.",
            "-o",
            "--output",
            "--output-json",
            metavar="FORM|FILE",
        ),
    ] = None  # a list, so that a second one is seen
    metric_percentiles: Annotated[str, _result("Percentiles of every metric.", metavar="LIST")] = (
        "50,90,99"
    )
    save_result: Annotated[
        bool, _result("Write figures, settings and machine as JSON.", "--save-result")
    ] = False
    result_dir: Annotated[Path, _result("Where.")] = Path("benchmarks/results")
    result_filename: Annotated[str | None, _result("Its name (default: benchmark and time).")] = (
        None
    )

    def percentiles(self) -> list[float]:
        """The percentiles.

        Raises:
            ConfigError: One is no number from 0 to 100.
        """
        try:
            found = [float(part) for part in self.metric_percentiles.split(",")]
        except ValueError:
            found = [-1.0]
        if not all(0 <= value <= 100 for value in found):
            raise ConfigError(
                f"not a list of percentiles: `{self.metric_percentiles}`", "write it like 50,90,99"
            )
        return found

    def check(self, common: Common) -> str:
        """The form of the output.

        Raises:
            ConfigError: It, or a percentile, is none that there is, there are two, or a file
                cannot be written.
        """
        from pw.evaluation.bench.report import FORMS

        self.percentiles()
        if len(given := list(dict.fromkeys(self.output or ()))) > 1:
            raise ConfigError(
                f"two outputs: `{given[0]}` and `{given[1]}`",
                "-o, --output and --output-json are one option: give it once; --save-result "
                "writes JSON beside it",
            )
        form = self._asked if self.file is None else self.file.suffix[1:]
        if form not in FORMS:
            raise ConfigError(
                f"unknown output form: `{self._asked}`",
                f"use {', '.join(FORMS)}, or a file whose name ends so",
            )
        if self.file is not None:
            check_folder(self.file.parent, "--output")
        if self.save_result:
            check_folder(self.result_dir, "--result-dir")
        return "json" if common.json and self.file is None else form

    @property
    def _asked(self) -> str:
        return self.output[-1] if self.output else "md"

    @property
    def file(self) -> Path | None:
        """The file that the output goes to; None: it is printed."""
        path = Path(self._asked)
        return path if path.suffix else None

    def show(
        self,
        kind: str,
        result: dict[str, Any],
        common: Common,
        *,
        table: str | None = None,
        rows: Sequence[dict[str, Any]] | None = None,
    ) -> None:
        """Print a result or write it to a file, and save the record if asked to.

        Args:
            kind: Which benchmark.
            result: Its figures and settings.
            common: Whether JSON is wanted.
            table: For people, where it is more than names and values.
            rows: For spreadsheets, where it is more than one.
        """
        from pw.evaluation.bench.report import render, save

        form = self.check(common)
        if form == "md" and table is not None:
            text = table
        else:
            text = render(rows if form == "csv" and rows is not None else [result], form)
        if self.file is None:
            print(text)
        else:
            self.file.write_text(text + "\n", "utf-8")
            if common.json:
                print(render([result], "json"))
        if self.save_result:
            path = save(result, kind, self.result_dir, self.result_filename)
            if not common.quiet:
                typer.echo(f"saved: {path}", err=True)


def refuse_idle(runtime: Runtime, planner: Planner, result: Result, *, lengths: bool) -> None:
    """Refuse what a comparison of policies would not look at.

    Args:
        runtime: Options of the engines.
        planner: Those of their planner.
        result: Those of the output.
        lengths: The longest contexts are asked for, too: they may have a limit.

    Raises:
        ConfigError: An option that changes no cell is given, or that it cannot do.
    """
    if runtime.tensor_parallel_size > 1:
        raise ConfigError(
            "contexts of the comparison are filled on one device: "
            f"--tensor-parallel-size {runtime.tensor_parallel_size}",
            "leave it out: `pw bench throughput` and `latency` measure several ranks",
        )
    rests = "the comparison sets it: planes rest while steps are timed"
    for flag, given, default, hint in (
        (
            "--precision-policy",
            runtime.precision_policy,
            Runtime.precision_policy,
            f"give --policy {runtime.precision_policy}; it can be repeated",
        ),
        (
            "--max-num-seqs",
            runtime.max_num_seqs,
            Runtime.max_num_seqs,
            "--batch-size says how many sequences run; it can be repeated",
        ),
        (
            "--max-model-len",
            Runtime.max_model_len if lengths else runtime.max_model_len,
            Runtime.max_model_len,
            "--context says how long contexts are",
        ),
        ("--seed", runtime.seed, Runtime.seed, "all runs have the same contexts and prompts"),
        ("--low-watermark", planner.low_watermark, Planner.low_watermark, rests),
        ("--high-watermark", planner.high_watermark, Planner.high_watermark, rests),
        ("--forecast-steps", planner.forecast_steps, Planner.forecast_steps, rests),
        (
            "--metric-percentiles",
            result.metric_percentiles,
            Result.metric_percentiles,
            "50 and 99 are told",
        ),
    ):
        if given != default:
            raise ConfigError(
                f"{flag} changes no cell of the comparison: {given}", f"leave it out: {hint}"
            )


@dataclass(frozen=True)
class Client:
    """Which server, and how it is asked."""

    base_url: Annotated[
        str | None,
        _server("Root of the server, `/v1` or not (default: http://HOST:PORT).", metavar="URL"),
    ] = None
    host: Annotated[str, _server("Address of the server.")] = "127.0.0.1"
    port: Annotated[int, _server("Its port.")] = 8000
    backend: Annotated[
        str, _server("openai or vllm (completions), or openai-chat.", metavar="NAME")
    ] = "openai"
    endpoint: Annotated[
        str | None,
        _server("/v1/completions or /v1/chat/completions, in place of --backend.", metavar="PATH"),
    ] = None
    model: Annotated[
        str | None, _server("Model to ask for (default: the first that the server lists).")
    ] = None
    tokenizer: Annotated[
        str | None,
        _server("Artifact or checkpoint whose tokenizer counts texts and draws random ids."),
    ] = None
    api_key: Annotated[str | None, _server("Key of the server.")] = None
    request_rate: Annotated[float, _server("Requests per second; inf sends all at once.")] = float(
        "inf"
    )
    burstiness: Annotated[float, _server("1: Poisson arrivals; less: in bursts; more: evenly.")] = (
        1.0
    )
    max_concurrency: Annotated[int | None, _server("Open requests at most.")] = None
    request_timeout: Annotated[float, _server("Seconds of silence that end a request.")] = 600.0
    percentile_metrics: Annotated[
        str, _server("Which of ttft, tpot, itl, e2el.", metavar="LIST")
    ] = "ttft,tpot,itl,e2el"
    goodput: Annotated[
        list[str] | None,
        _server("Limits in ms of a good request, like `ttft:500 tpot:50`; repeatable."),
    ] = None
    seed: Annotated[int, _workload("Of prompts and arrivals.")] = 0

    def asked(self) -> str:
        """The endpoint.

        Raises:
            ConfigError: It, or the backend, is unknown.
        """
        from pw.evaluation.bench.client import ENDPOINTS

        completions, chat = ENDPOINTS
        backends = {"openai": completions, "vllm": completions, "openai-chat": chat}
        if self.backend not in backends:
            raise ConfigError(f"unknown backend: `{self.backend}`", f"use {' or '.join(backends)}")
        if self.endpoint not in (None, *ENDPOINTS):
            raise ConfigError(
                f"unknown endpoint: `{self.endpoint}`", f"use {' or '.join(ENDPOINTS)}"
            )
        return self.endpoint or backends[self.backend]

    def metrics(self) -> list[str]:
        """The metrics.

        Raises:
            ConfigError: One is unknown.
        """
        from pw.evaluation.bench.metrics import METRICS

        found = self.percentile_metrics.split(",")
        if unknown := [name for name in found if name not in METRICS]:
            raise ConfigError(f"unknown metric: `{unknown[0]}`", f"use {', '.join(METRICS)}")
        return found

    def counted(self, workload: Workload) -> list[Request]:
        """Requests drawn and counted with the tokenizer that `--tokenizer` names."""
        from pw.models.light import load_tokenizer_alone
        from pw.models.resolve import resolve_model

        name = self.tokenizer or ""
        folder = artifact_path(name) if name == TINY else resolve_model(name)
        tokenizer = load_tokenizer_alone(folder)
        return workload.requests(
            range(tokenizer.vocab_size), lambda text: len(tokenizer.encode(text))
        )
