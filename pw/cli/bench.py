"""`pw bench`: how fast, how much at a time, and what happens when memory gets short."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from pw.cli.address import server_url
from pw.cli.bench_options import Client, Dataset, Result, random_seed, refuse_idle
from pw.cli.command import add_command, print_json
from pw.cli.locate import TINY, model_folder
from pw.cli.options import Calibration, Common, Planner, Runtime, Widths
from pw.cli.stages import build, fit, progress_of
from pw.config import PlannerConfig
from pw.errors import ConfigError

_DEFAULT = "compare"

Served = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="An artifact, `tiny`, or a config or recipe with --load-format dummy."
    ),
]


def throughput(
    model: Served,
    dataset: Dataset,
    result: Result,
    runtime: Runtime,
    planner: Planner,
    common: Common,
) -> None:
    """Tokens per second when all requests are there at once; no server in between."""
    config = runtime.config(planner)
    result.check(common)
    workload = dataset.workload(random_seed(runtime.seed))
    path = model_folder(model, runtime, quiet=common.quiet)

    from pw.engine import Engine
    from pw.evaluation.bench.offline import throughput as measure

    engine = Engine.from_artifact(path, config)
    tokenizer = engine.tokenizer
    vocabulary, count = range(tokenizer.vocab_size), lambda text: len(tokenizer.encode(text))
    requests = workload.requests(vocabulary, count)
    with progress_of(common).stage("throughput", len(requests), "requests") as advance:
        figures = measure(
            engine,
            requests,
            ignore_eos=dataset.ignore_eos,
            concurrency=config.max_num_queued_reqs,
            percentiles=result.percentiles(),
            advance=advance,
        )
    result.show("throughput", {"model": model} | figures, common)


def latency(
    model: Served,
    result: Result,
    runtime: Runtime,
    planner: Planner,
    common: Common,
    input_len: Annotated[int, typer.Option("-p", "--input-len", help="Tokens of a prompt.")] = 32,
    output_len: Annotated[
        int, typer.Option("-n", "--output-len", help="Tokens of an answer.")
    ] = 128,
    batch_size: Annotated[int, typer.Option(help="Requests of a batch.")] = 8,
    num_iters_warmup: Annotated[int, typer.Option(help="Batches before the clock runs.")] = 2,
    num_iters: Annotated[int, typer.Option("-r", "--num-iters", help="Batches timed.")] = 10,
) -> None:
    """Time of one batch of equal requests, prompt included; no server in between."""
    config = runtime.config(planner)
    result.check(common)
    if min(input_len, output_len, batch_size, num_iters) < 1 or num_iters_warmup < 0:
        raise ConfigError("lengths, batch size and iterations must be at least 1")
    if batch_size > config.max_num_seqs:
        raise ConfigError(
            f"--batch-size {batch_size} is more than the {config.max_num_seqs} sequences that run",
            f"give --max-num-seqs {batch_size}, too: others would wait",
        )
    path = model_folder(model, runtime, quiet=common.quiet)

    from pw.engine import Engine
    from pw.evaluation.bench.offline import latency as measure

    engine = Engine.from_artifact(path, config)
    with progress_of(common).stage("latency", num_iters_warmup + num_iters, "batches") as advance:
        figures = measure(
            engine,
            input_len=input_len,
            output_len=output_len,
            batch_size=batch_size,
            warmup=num_iters_warmup,
            iterations=num_iters,
            percentiles=result.percentiles(),
            seed=random_seed(runtime.seed),
            advance=advance,
        )
    result.show("latency", {"model": model} | figures, common)


def serve(client: Client, dataset: Dataset, result: Result, common: Common) -> None:
    """Load on a running server that speaks OpenAI's HTTP: ours, vLLM's, any."""
    import asyncio

    from pw.evaluation.bench.client import Pace, Target, run
    from pw.evaluation.bench.metrics import parse_goodput, summarize

    result.check(common)
    metrics, limits = client.metrics(), parse_goodput(client.goodput or [])
    endpoint = client.asked()
    workload = dataset.workload(random_seed(client.seed))
    requests = workload.requests() if client.tokenizer is None else client.counted(workload)
    target = Target(
        base_url=server_url(client.base_url or f"http://{client.host}:{client.port}", "--base-url"),
        endpoint=endpoint,
        model=client.model,
        api_key=client.api_key,
        ignore_eos=dataset.ignore_eos,
        timeout=client.request_timeout,
    )
    pace = Pace(client.request_rate, client.burstiness, client.max_concurrency, client.seed)
    timings, ran = asyncio.run(run(target, requests, pace))
    figures = summarize(
        timings,
        ran["duration"],
        metrics=metrics,
        percentiles=result.percentiles(),
        goodput=limits,
    )
    settings = {
        "model": ran["model"],
        "base_url": target.base_url,
        "dataset": workload.dataset,
        "num_prompts": len(requests),
        "request_rate": "inf" if client.request_rate == float("inf") else client.request_rate,
        "max_concurrency": client.max_concurrency,
        "goodput_limits_ms": limits,
    }
    result.show("serve", settings | figures, common)
    if figures["failed"]:
        typer.echo(f"{figures['failed']} of {len(timings)} requests failed", err=True)
        raise typer.Exit(1)


def squeeze(
    model: Served,
    result: Result,
    runtime: Runtime,
    planner: Planner,
    common: Common,
    cycles: Annotated[int, typer.Option(help="Times that memory gets short and long again.")] = 10,
    probes: Annotated[int, typer.Option(help="Short requests whose steps are timed.")] = 4,
    steady_steps: Annotated[int, typer.Option(help="Steps of theirs before the pressure.")] = 32,
    ease_steps: Annotated[int, typer.Option(help="Steps of theirs after it.")] = 64,
    load: Annotated[
        float, typer.Option(help="KV of the long requests over the room beside the experts.")
    ] = 1.5,
    seconds: Annotated[float, typer.Option(help="No cycle is begun after so many.")] = float("inf"),
    idle_grace: Annotated[
        float, typer.Option(help="Seconds without a request before planes come back for that.")
    ] = PlannerConfig.idle_grace_seconds,
) -> None:
    """Contexts grow until the widest experts no longer fit, then shrink: bytes, pages, stalls.

    Without --memory-budget: what holds the widest experts and half a full context.
    """
    config = runtime.config(planner)
    config = replace(config, planner=replace(config.planner, idle_grace_seconds=idle_grace))
    result.check(common)
    if config.policy.kind != "adaptive":
        raise ConfigError(f"only adaptive precision can be squeezed: {config.policy}")
    if min(cycles, probes, steady_steps, ease_steps) < 1 or not load > 0:
        raise ConfigError("cycles, probes and steps must be at least 1, load positive")
    path = model_folder(model, runtime, quiet=common.quiet)

    from pw.engine import Engine
    from pw.evaluation.bench.squeeze import SqueezeRun, tight_budget
    from pw.evaluation.bench.squeeze_settings import Squeeze

    if runtime.memory_budget is None and runtime.gpu_memory_utilization is None:
        budget = tight_budget(Engine.from_artifact(path, config), config.planner.low_watermark)
        config = replace(config, memory_budget=budget)
    settings = Squeeze(
        cycles=cycles,
        probes=probes,
        steady_steps=steady_steps,
        ease_steps=ease_steps,
        load=load,
        seconds=seconds,
        max_long=config.max_num_seqs - probes,
        seed=random_seed(runtime.seed),
    )
    run = SqueezeRun(Engine.from_artifact(path, config), settings)
    with progress_of(common).stage("squeeze", cycles, "cycles") as advance:
        figures = run.run(advance)
    result.show("squeeze", {"model": model, "budget": config.memory_budget} | figures, common)
    if figures["bytes_over_budget"] or figures["pages_leaked"] or figures["cycles_without_return"]:
        raise typer.Exit(1)
    if figures["interrupted"]:
        raise typer.Exit(130)


def matrix(
    model: Served,
    result: Result,
    runtime: Runtime,
    planner: Planner,
    common: Common,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="dense, static:<bits>, adaptive:<bits> (planned widths in the bytes of so many "
            "bits) or held:<bits> (those widths, fixed); repeatable (default: dense, static:6, "
            ":4, :3, adaptive:4, :3, as --min-bits and --max-bits allow)."
        ),
    ] = None,
    batch_size: Annotated[
        list[int] | None, typer.Option(help="Requests at a time; repeatable (1, 4, 8, 32, 64).")
    ] = None,
    context: Annotated[
        list[int] | None, typer.Option(help="Tokens of each context; repeatable (1024, 8192).")
    ] = None,
    steps: Annotated[int, typer.Option(help="Decode steps timed in each cell.")] = 100,
    prompt_tokens: Annotated[
        int, typer.Option(help="Tokens of a batch's real prompts, at most; contexts are filled.")
    ] = 16384,
    most_tokens: Annotated[
        int, typer.Option(help="No cell whose contexts have more tokens together.")
    ] = 1 << 20,
    seconds: Annotated[float, typer.Option(help="No cell is begun after so many.")] = float("inf"),
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Where the device's time goes, by kind of kernel.")
    ] = False,
    transformers: Annotated[
        bool, typer.Option("--transformers", help="Its `generate` too, one sequence, same shape.")
    ] = False,
    longest_within: Annotated[
        str | None,
        typer.Option(metavar="BYTES", help="The longest context that each policy admits there."),
    ] = None,
) -> None:
    """Policies side by side: decode steps, first tokens and bytes by batch size and context.

    With --load-format dummy: transformers and long contexts of models that you do not have.
    """
    from dataclasses import asdict

    from pw.config import parse_bytes

    config = runtime.config(planner)
    result.check(common)
    if transformers and config.load_format != "dummy":
        raise ConfigError("--transformers needs --load-format dummy: random weights on both sides")
    refuse_idle(runtime, planner, result, lengths=longest_within is not None)
    path = model_folder(model, runtime, quiet=common.quiet)
    budget = None if longest_within is None else parse_bytes(longest_within)

    from pw.engine.start.ground import device_of
    from pw.evaluation.bench.faults import undisturbed
    from pw.evaluation.bench.longest import longest_contexts
    from pw.evaluation.bench.matrix import Matrix, run_matrix
    from pw.evaluation.bench.matrix_limits import Limits
    from pw.evaluation.bench.matrix_policies import allowed
    from pw.evaluation.bench.peers import transformers_generate
    from pw.evaluation.bench.tables import report, rows

    policy = policy or allowed(Matrix.policies, config)
    given = {"policies": policy, "batches": batch_size, "contexts": context}
    cells = Matrix(
        steps=steps,
        prompt_tokens=prompt_tokens,
        most_tokens=most_tokens,
        seconds=seconds,
        kernels=kernels,
        **{name: tuple(dict.fromkeys(value)) for name, value in given.items() if value},  # type: ignore[arg-type]
    )
    settings = asdict(cells) | {"seconds": None if seconds == float("inf") else seconds}
    tell = (lambda _: None) if common.quiet else (lambda text: typer.echo(text, err=True))
    figures: dict[str, Any] = {"model": model, "settings": settings}
    if transformers:
        limits = Limits.of(path, config.load_format)
        cells.check(limits, config)  # before it takes minutes
        contexts = cells.possible(limits)
        figures["transformers"] = transformers_generate(path, device_of(config), contexts)
    figures |= run_matrix(path, config, cells, tell)
    try:
        if budget is not None and not (figures["interrupted"] or "failed" in figures):
            fixed = [name for name in cells.policies if not name.startswith(("adaptive", "held"))]
            within = replace(config, memory_budget=budget)
            figures["longest_contexts"] = longest_contexts(path, within, ["adaptive", *fixed])
    except KeyboardInterrupt:
        figures["interrupted"] = True
    finally:  # what has been measured is kept, whatever befell the rest
        with undisturbed():
            result.show("matrix", figures, common, table=report(figures), rows=rows(figures))
    if figures["interrupted"]:
        raise typer.Exit(130)
    if all("left_out" in cell for cell in figures["cells"]):
        typer.echo("no cell was measured", err=True)
        raise typer.Exit(1)
    if "failed" in figures:
        raise typer.Exit(1)


def compare(
    runtime: Runtime,
    planner: Planner,
    common: Common,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A checkpoint folder, a hub id, or `tiny`.")
    ] = TINY,
    batch_size: Annotated[
        list[int] | None, typer.Option(help="Requests at a time; repeatable (default: 1 and 8).")
    ] = None,
    input_len: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 64,
    output_len: Annotated[int, typer.Option(help="Tokens made for each prompt.")] = 64,
    repeats: Annotated[int, typer.Option(help="Timed runs; the median counts.")] = 3,
) -> None:
    """Measure speed: calibration, planner, tokens per second beside transformers."""
    config = runtime.config(planner)

    import tempfile

    from pw.engine import Engine
    from pw.evaluation.speed import (
        Load,
        describe,
        engine_speed,
        planner_seconds,
        transformers_speed,
    )
    from pw.models.resolve import resolve_model

    folder = resolve_model(model)
    loads = [Load(batch, input_len, output_len) for batch in batch_size or (1, 8)]
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "bench.pw"
        started = time.monotonic()
        build(model, path, Widths(), Calibration(), common)
        calibrate_seconds = time.monotonic() - started
        fit(path, common)
        engine = Engine.from_artifact(path, config)
        vocabulary = engine.tokenizer.vocab_size
        ours = [engine_speed(engine, load, vocabulary, repeats=repeats) for load in loads]
        bits = engine.status().mean_bits
    theirs = transformers_speed(folder, loads, vocabulary, repeats=repeats)
    result = {
        "model": model,
        "calibrate_seconds": calibrate_seconds,
        "planner_seconds": planner_seconds(),
        "planner_entries": 17_280,
        "policy": str(config.policy),
        "mean_bits": bits,
        "tokens_per_second": [
            asdict(load) | {"pw": mine, "transformers": other}
            for load, mine, other in zip(loads, ours, theirs, strict=True)
        ],
    }
    if common.json:
        print_json(result)
    else:
        print(describe(result))


class _BenchGroup(TyperGroup):
    """`pw bench MODEL` is `pw bench compare MODEL`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the default in where no command is named."""
        if not args or (args[0] not in self.commands and args[0] not in ctx.help_option_names):
            args = [_DEFAULT, *args]
        return super().parse_args(ctx, args)


def bench_app() -> typer.Typer:
    """The group of commands."""
    app = typer.Typer(
        cls=_BenchGroup,
        help="Measure speed and memory; `pw bench MODEL` is `pw bench compare MODEL`.",
        context_settings={"help_option_names": ["-h", "--help"]},
        rich_markup_mode="rich",
    )
    panels: dict[str, tuple[Callable[..., None], ...]] = {
        "In this process": (throughput, latency, squeeze),
        "Against others": (serve, compare, matrix),
    }
    for panel, functions in panels.items():
        for function in functions:
            add_command(app, function, panel=panel)
    return app
