"""The command that scores a policy: perplexity of a text, with all bytes by class."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from pw.cli.command import print_json
from pw.cli.locate import artifact_path
from pw.cli.offline import progress_of
from pw.cli.options import Common, Planner, Runtime
from pw.config import EngineConfig
from pw.errors import ConfigError

_TEXT = "Text"

ModelName = Annotated[
    str, typer.Argument(metavar="MODEL", help="An artifact (see `pw calibrate`), or `tiny`.")
]


def evaluate(
    model: ModelName,
    runtime: Runtime,
    planner: Planner,
    common: Common,
    text: Annotated[
        str,
        typer.Option(
            help="A .txt, a .jsonl with `text`, or `bundled` (held-out).",
            metavar="FILE",
            rich_help_panel=_TEXT,
        ),
    ] = "bundled",
    seqlen: Annotated[
        int,
        typer.Option(help="Tokens of a chunk, each a context of its own.", rich_help_panel=_TEXT),
    ] = 2048,
    max_chunks: Annotated[
        int | None, typer.Option(help="Chunks at most.", rich_help_panel=_TEXT)
    ] = None,
    concurrency: Annotated[
        int, typer.Option(help="Chunks scored at a time.", rich_help_panel=_TEXT)
    ] = 4,
    baseline: Annotated[
        Path | None,
        typer.Option(
            help="An earlier --json result to compare with, chunk by chunk.", rich_help_panel=_TEXT
        ),
    ] = None,
) -> None:
    """Perplexity of a text under a precision policy, with all bytes by class."""
    config = runtime.config(planner)
    earlier = None if baseline is None else _read_baseline(baseline)
    path = artifact_path(model, quiet=common.quiet)

    result = score(
        path,
        config,
        text,
        common,
        seqlen=seqlen,
        max_chunks=max_chunks,
        concurrency=concurrency,
        earlier=earlier,
    )
    if common.json:
        print_json(result)
    else:
        print_score(result)


def score(
    path: Path,
    config: EngineConfig,
    text: str,
    common: Common,
    *,
    seqlen: int,
    max_chunks: int | None,
    concurrency: int = 4,
    earlier: list[float] | None = None,
) -> dict[str, Any]:
    """Perplexity of a text with an artifact; `earlier` are the chunks' losses to compare with."""
    from pw.engine import Engine
    from pw.evaluation.bootstrap import paired_interval
    from pw.evaluation.perplexity import cut_chunks, perplexity
    from pw_pipelines.calibration import bos_prefix

    engine = Engine.from_artifact(path, config)
    prefix = bos_prefix(engine.tokenizer)
    tokens = engine.tokenizer.encode(_read_text(text), add_special_tokens=False)
    chunks = cut_chunks(tokens, seqlen, prefix=prefix, limit=max_chunks)
    with progress_of(common).stage("eval", len(chunks), "chunks") as advance:
        report = perplexity(
            engine, chunks, prefix=len(prefix), concurrency=concurrency, advance=advance
        )
    result: dict[str, Any] = asdict(report)
    result["bytes"]["total"] = report.bytes.total
    if earlier is not None:
        result["nll_difference"] = asdict(paired_interval(report.chunk_nll, earlier))
    return result


def _read_text(name: str) -> str:
    """The text to score: documents joined by a blank line."""
    from pw.models.resolve import asset
    from pw_pipelines.calibration import load_documents

    documents = load_documents(str(asset("heldout.jsonl")) if name == "bundled" else name)
    if not all(isinstance(document, str) for document in documents):
        raise ConfigError(f"perplexity needs plain text, not chats: `{name}`")
    return "\n\n".join(document for document in documents if isinstance(document, str))


def _read_baseline(path: Path) -> list[float]:
    try:
        values = json.loads(path.read_text("utf-8"))["chunk_nll"]
        return [float(value) for value in values]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"not a result of `pw eval --json`: `{path}`",
            "save one with `pw eval ... --json > FILE`",
        ) from error


def print_score(result: dict[str, Any]) -> None:
    """Print what `score` gives."""
    nll = result["nll"]
    print(f"policy      {result['policy']}, mean {result['mean_bits']:.2f} bits")
    print(f"perplexity  {result['perplexity']:.3f}")
    print(
        f"nll         {nll['mean']:.4f} nats a token "
        f"[{nll['low']:.4f}, {nll['high']:.4f}] over {len(result['chunk_nll'])} chunks "
        f"of {result['chunk_tokens']} tokens"
    )
    if "nll_difference" in result:
        difference = result["nll_difference"]
        print(
            f"difference  {difference['mean']:+.4f} "
            f"[{difference['low']:+.4f}, {difference['high']:+.4f}] against the baseline"
        )
    print(f"bytes       {result['bytes']['total']:,} of {result['bytes']['budget']:,}")
    for name, value in result["bytes"].items():
        if value and name not in ("total", "budget"):
            print(f"  {name:<14}{value:>16,}")
    print(f"over budget {result['bytes_over_budget']} bytes")
