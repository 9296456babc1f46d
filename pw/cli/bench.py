"""The command that measures speed, beside transformers' own `generate`."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from pw.cli.command import print_json
from pw.cli.locate import TINY
from pw.cli.offline import build, fit
from pw.cli.options import Calibration, Common, Planner, Runtime, Widths


def bench(
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
    from pw.evaluation.speed import Load, engine_speed, planner_seconds, transformers_speed
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
        _print_speed(result)


def _print_speed(result: dict[str, Any]) -> None:
    print(f"calibrate `{result['model']}`  {result['calibrate_seconds']:.1f} s")
    print(
        f"planner, {result['planner_entries']:,} entries  {result['planner_seconds'] * 1e3:.2f} ms"
    )
    for row in result["tokens_per_second"]:
        print(
            f"batch {row['batch_size']}, {row['input_len']} + {row['output_len']} tokens  "
            f"{row['pw']:.0f} tokens/s at {result['mean_bits']:.2f} bits, "
            f"transformers {row['transformers']:.0f}, ratio {row['pw'] / row['transformers']:.2f}"
        )
