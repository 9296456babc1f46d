"""Groups of options that several commands share, and how they become the stages' settings.

A field is a flag: `max_model_len` is `--max-model-len`, `--max_model_len` and `PW_MAX_MODEL_LEN`.
Names and units are those that users of vLLM, llama.cpp and Hugging Face know.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pw.config import (
    CalibrationConfig,
    EngineConfig,
    PlannerConfig,
    PrecisionPolicy,
    QuantizeConfig,
    parse_bytes,
    parse_memory,
)
from pw.errors import ConfigError

if TYPE_CHECKING:
    from pw.engine.request import SamplingParams


def option(panel: str, text: str, *names: str, metavar: str | None = None) -> Any:
    """An option of a field, listed under a heading of `--help`."""
    return typer.Option(*names, help=text, metavar=metavar, rich_help_panel=panel)


_output = partial(option, "Output")
_calibration = partial(option, "Calibration")
_widths = partial(option, "Bit-widths")
_memory = partial(option, "Memory")
_precision = partial(option, "Precision")
_planner = partial(option, "Planner (the defaults are good)")
_scheduling = partial(option, "Scheduling")
_model = partial(option, "Model")
_ranks = partial(option, "Several GPUs")
_sampling = partial(option, "Sampling")


@dataclass(frozen=True)
class Common:
    """What every command has."""

    quiet: Annotated[bool, _output("Only results and errors.", "--quiet", "-q")] = False
    verbose: Annotated[bool, _output("Details; a traceback with errors.", "--verbose", "-v")] = (
        False
    )
    json: Annotated[bool, _output("The result as JSON on stdout.", "--json")] = False


@dataclass(frozen=True)
class Calibration:
    """Which text the model reads offline."""

    dataset: Annotated[
        str,
        _calibration("A .jsonl with `text` or `messages`, a .txt, or `bundled`.", metavar="FILE"),
    ] = CalibrationConfig.dataset
    nsamples: Annotated[int, _calibration("Number of samples.")] = CalibrationConfig.nsamples
    seqlen: Annotated[int, _calibration("Tokens in a sample.")] = CalibrationConfig.seqlen
    seed: Annotated[int, _calibration("Which samples are drawn.")] = CalibrationConfig.seed
    device: Annotated[str, _calibration("auto, cpu or cuda.")] = "auto"
    workers: Annotated[int | None, _calibration("CPU cores to use (default: all).")] = None

    def use_cores(self) -> None:
        """Let torch use so many cores as were asked for, in this process.

        Raises:
            ConfigError: Fewer than one.
        """
        if self.workers is None:
            return
        if self.workers < 1:
            raise ConfigError(f"--workers must be at least 1: {self.workers}")

        import torch

        torch.set_num_threads(self.workers)

    def config(self) -> CalibrationConfig:
        """The stage's settings."""
        return CalibrationConfig(self.dataset, self.nsamples, self.seqlen, self.seed)


@dataclass(frozen=True)
class Widths:
    """Which widths an artifact offers."""

    min_bits: Annotated[
        int, _widths("Narrowest width, 2 or 3.", "--min-bits", "--seed-precision")
    ] = QuantizeConfig.min_bits
    max_bits: Annotated[
        str,
        _widths(
            "Widest width; auto: the widest that is smaller than the dense weights.",
            "--max-bits",
            "--parent-precision",
            metavar="BITS|auto",
        ),
    ] = "auto"
    strict_coverage: Annotated[
        bool,
        _calibration("Refuse when an expert sees no calibration token.", "--strict-coverage"),
    ] = False
    codebook: Annotated[
        str,
        _widths("joint (all widths under the full Hessian), or kmeans (quicker, as in APL)."),
    ] = QuantizeConfig.codebook

    def config(self, calibration: Calibration) -> QuantizeConfig:
        """The stage's settings."""
        widest = None if self.max_bits == "auto" else _integer("--max-bits", self.max_bits)
        return QuantizeConfig(
            self.min_bits, widest, calibration.config(), self.strict_coverage, self.codebook
        )


@dataclass(frozen=True)
class Planner:
    """The planner's and the pressure policy's dials."""

    planner: Annotated[str, _planner("hull, or greedy (the paper's).")] = PlannerConfig.planner
    sensitivity_metric: Annotated[str, _planner("output-gradient, or hessian (the paper's).")] = (
        "output-gradient"
    )
    residual: Annotated[
        str, _planner("off, exact, learned, or auto: learned once `pw fit-residuals` has run.")
    ] = PlannerConfig.residual
    hot_expert_floor: Annotated[
        int | None, _planner("Least bits of a hot expert (default: one above the floor).")
    ] = PlannerConfig.hot_expert_floor
    layer_floor: Annotated[float, _planner("Least mean bits of a layer.")] = (
        PlannerConfig.layer_floor
    )
    routing_window: Annotated[
        int, _planner("Tokens after which a routing count has decayed to 1/e.")
    ] = PlannerConfig.routing_window
    low_watermark: Annotated[
        float, _planner("Share of free pages below which planes are given up.")
    ] = PlannerConfig.low_watermark
    high_watermark: Annotated[
        float, _planner("Share of free pages above which planes come back.")
    ] = PlannerConfig.high_watermark
    dwell_steps: Annotated[int, _planner("Least steps from a reduction to the next reload.")] = (
        PlannerConfig.dwell_steps
    )
    forecast_steps: Annotated[int, _planner("Steps of decoding whose KV pages are foreseen.")] = (
        PlannerConfig.forecast_steps
    )
    transfer_budget: Annotated[
        str, _planner("Bytes reloaded per second at most.", metavar="BYTES")
    ] = f"{PlannerConfig.transfer_budget_bytes >> 20}MiB"

    def config(self) -> PlannerConfig:
        """The planner's settings."""
        return PlannerConfig(
            planner=self.planner,
            metric=self.sensitivity_metric.replace("-", "_"),
            residual=self.residual,
            routing_window=self.routing_window,
            hot_expert_floor=self.hot_expert_floor,
            layer_floor=self.layer_floor,
            low_watermark=self.low_watermark,
            high_watermark=self.high_watermark,
            dwell_steps=self.dwell_steps,
            forecast_steps=self.forecast_steps,
            transfer_budget_bytes=parse_memory("--transfer-budget", self.transfer_budget),
        )


@dataclass(frozen=True)
class Runtime:
    """What it takes to run a model; `serve`, `generate` and `eval` share it."""

    memory_budget: Annotated[
        str | None,
        _memory(
            "Bytes for weights, KV cache and workspace together, like `24MiB` or `10GB`.",
            "--memory-budget",
            "--gpu-memory-limit",
            metavar="BYTES",
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float | None,
        _memory(
            "The same as a fraction of the device's memory "
            f"(default {EngineConfig.gpu_memory_utilization})."
        ),
    ] = None
    offload_cpu_memory: Annotated[
        str | None,
        _memory("Host bytes for planes off the device (default: all planes).", metavar="BYTES"),
    ] = None
    page_bytes: Annotated[
        str | None,
        _memory("Size of a page, a power of two (default: least padding).", metavar="BYTES"),
    ] = None
    kv_cache_dtype: Annotated[str, _memory("auto, float32, bfloat16 or float16.")] = (
        EngineConfig.kv_cache_dtype
    )
    precision_policy: Annotated[
        str,
        _precision("adaptive, static:<bits>, static:<file>, replay:<trace> or dense."),
    ] = "adaptive"
    min_bits: Annotated[
        int | None, _precision("Floor of every block (default: the artifact's).")
    ] = None
    max_bits: Annotated[
        int | None, _precision("Ceiling of every block (default: the artifact's).")
    ] = None
    precision_trace: Annotated[
        Path | None, _precision("Write every transition with its reason here (JSONL).")
    ] = None
    trace_requests: Annotated[
        bool, _precision("Token ids in the trace too, for a replay.", "--trace-requests")
    ] = False
    enable_prefix_caching: Annotated[
        bool,
        _memory(
            "Keep the KV of prompts that are done until its pages are needed.",
            "--enable-prefix-caching/--no-enable-prefix-caching",
        ),
    ] = EngineConfig.enable_prefix_caching
    prefix_cache_precision: Annotated[
        str,
        _precision(
            "Kept KV after widths have changed: not-worse (use it if its widths were as good as "
            "now, to 1/8 bit), any or exact."
        ),
    ] = EngineConfig.prefix_cache_precision
    max_model_len: Annotated[
        str,
        _scheduling(
            "Longest context in tokens, like `4096`, `16k` or `auto`.", metavar="TOKENS|auto"
        ),
    ] = "auto"
    max_num_seqs: Annotated[int, _scheduling("Sequences that run at a time.")] = (
        EngineConfig.max_num_seqs
    )
    max_num_batched_tokens: Annotated[
        int | None,
        _scheduling(
            "Tokens in one step (default: 512; on a GPU up to 2048, as sliding windows and the "
            "budget allow)."
        ),
    ] = EngineConfig.max_num_batched_tokens
    enforce_eager: Annotated[
        bool,
        _scheduling("No CUDA graphs for decoding: slower, for debugging.", "--enforce-eager"),
    ] = EngineConfig.enforce_eager
    async_scheduling: Annotated[
        bool,
        _scheduling(
            "Launch a decode step before the tokens of the last are read (with CUDA graphs).",
            "--async-scheduling/--no-async-scheduling",
        ),
    ] = EngineConfig.async_scheduling
    tensor_parallel_size: Annotated[
        int,
        _ranks(
            "Ranks that share the model: a GPU, a process and a memory budget each.",
            "--tensor-parallel-size",
            "-tp",
        ),
    ] = EngineConfig.tensor_parallel_size
    enable_expert_parallel: Annotated[
        bool,
        _ranks(
            "Whole experts by rank, not a part of each on every rank.", "--enable-expert-parallel"
        ),
    ] = EngineConfig.enable_expert_parallel
    collective_timeout: Annotated[
        float, _ranks("Seconds that a rank waits for another before the replica ends.")
    ] = EngineConfig.collective_timeout
    load_format: Annotated[
        str,
        _model("auto, or dummy: random weights in the shape of MODEL, a config.json or recipe."),
    ] = EngineConfig.load_format
    hf_overrides: Annotated[
        str | None,
        _model('Keys of the config to change with dummy, like `{"num_hidden_layers": 4}`.'),
    ] = None
    device: Annotated[str, _model("auto, cpu or cuda.")] = EngineConfig.device
    dtype: Annotated[str, _model("auto, float32, bfloat16 or float16.")] = EngineConfig.dtype
    checkpoint: Annotated[
        Path | None,
        _model("The unquantized model, for policy dense (default: the artifact's source)."),
    ] = None
    seed: Annotated[
        int | None, _model("Seed of requests that bring none (default: fresh entropy).")
    ] = None

    def config(self, planner: Planner, **overrides: Any) -> EngineConfig:
        """The engine's settings.

        Args:
            planner: The planner's options.
            overrides: Fields of `EngineConfig` that only one command has.

        Raises:
            ConfigError: A size does not parse, or budget and utilization are both given.
        """
        if self.memory_budget is not None and self.gpu_memory_utilization is not None:
            raise ConfigError(
                "--memory-budget and --gpu-memory-utilization exclude each other: "
                f"{self.memory_budget}, {self.gpu_memory_utilization}",
                "give one of them",
            )
        utilization = self.gpu_memory_utilization
        return EngineConfig(
            memory_budget=_size("--memory-budget", self.memory_budget),
            gpu_memory_utilization=(
                EngineConfig.gpu_memory_utilization if utilization is None else utilization
            ),
            policy=PrecisionPolicy.parse(self.precision_policy),
            device=self.device,
            dtype=self.dtype,
            kv_cache_dtype=self.kv_cache_dtype,
            page_bytes=None if self.page_bytes is None else parse_bytes(self.page_bytes),
            load_format=self.load_format,
            enable_prefix_caching=self.enable_prefix_caching,
            prefix_cache_precision=self.prefix_cache_precision,
            max_model_len=_tokens("--max-model-len", self.max_model_len),
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            enforce_eager=self.enforce_eager,
            async_scheduling=self.async_scheduling,
            min_bits=self.min_bits,
            max_bits=self.max_bits,
            offload_cpu_memory=_size("--offload-cpu-memory", self.offload_cpu_memory),
            seed=self.seed,
            trace=self.precision_trace,
            trace_requests=self.trace_requests,
            checkpoint=self.checkpoint,
            tensor_parallel_size=self.tensor_parallel_size,
            enable_expert_parallel=self.enable_expert_parallel,
            collective_timeout=self.collective_timeout,
            planner=planner.config(),
            **overrides,
        )


@dataclass(frozen=True)
class Sampling:
    """How `generate` samples."""

    max_tokens: Annotated[int, _sampling("New tokens at most.")] = 128
    temperature: Annotated[float, _sampling("0 takes the most likely token.")] = 0.0
    top_p: Annotated[float, _sampling("Least mass of the most likely tokens kept.")] = 1.0
    top_k: Annotated[int, _sampling("Number of the most likely tokens kept; -1: all.")] = -1
    stop: Annotated[
        list[str] | None, _sampling("Stop before this text; repeatable.", metavar="TEXT")
    ] = None
    ignore_eos: Annotated[bool, _sampling("Go on after the end token.", "--ignore-eos")] = False

    def params(self, seed: int | None) -> SamplingParams:
        """The request's parameters."""
        from pw.engine.request import SamplingParams

        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=seed,
            stop=tuple(self.stop or ()),
            ignore_eos=self.ignore_eos,
        )


def _size(flag: str, text: str | None) -> int | None:
    return None if text is None else parse_memory(flag, text)


def _integer(flag: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{flag} must be a number or auto: `{text}`") from None


def _tokens(flag: str, text: str) -> int | None:
    """Tokens from `4096`, `16k` (16,384, as engines count contexts) or `auto`."""
    if text == "auto":
        return None
    match = re.fullmatch(r"(\d+)([kK]?)", text)
    if not match or (tokens := int(match[1]) * (1024 if match[2] else 1)) < 1:
        raise ConfigError(f"{flag} must be tokens like `4096` or `16k`, or auto: `{text}`")
    return tokens
