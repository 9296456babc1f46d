"""`python -m pw.evaluation.demo`: calibrate, serve under a tight budget, watch, score, check."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import httpx
import torch
from rich.console import Console

from pw.config import PrecisionPolicy
from pw.engine.precision.trace import read_replay
from pw.errors import PwError
from pw.evaluation.demo.checks import Run, quality_checks, run_checks
from pw.evaluation.demo.load import Answer, Passages, run_wave, send
from pw.evaluation.demo.plot import plot_timeline
from pw.evaluation.demo.process import run_command, serving
from pw.evaluation.demo.report import (
    pages_in_words,
    print_checks,
    print_quality,
    print_run,
    write_results,
)
from pw.evaluation.demo.scoring import Comparison, Score, Scorer, at_equal_bytes
from pw.evaluation.demo.settings import MODEL, DemoSettings, heldout_documents
from pw.evaluation.demo.snapshots import bits_at, spread
from pw.evaluation.demo.timeline import QUIET, Observer
from pw.evaluation.demo.view import View
from pw.evaluation.perplexity import cut_chunks
from pw.models.tokenizer import load_tokenizer
from pw.store.artifact import Artifact

_PROBE = "The history of the islands begins with"
_PROBE_TOKENS = 32


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo.

    Returns:
        0 when every check passed, 1 otherwise.
    """
    parser = argparse.ArgumentParser(prog="demo", description=__doc__)
    parser.add_argument("--artifact", type=Path, default=Path("artifacts/tiny.pw"))
    parser.add_argument("--output", type=Path, default=Path("artifacts/demo"))
    parser.add_argument("--overwrite", action="store_true", help="make the artifact anew")
    options = parser.parse_args(arguments)
    terminal = sys.stdout.isatty()
    console = Console(width=None if terminal else 100, soft_wrap=not terminal)
    started = time.monotonic()
    try:
        make_artifact(options.artifact, options.overwrite, console)
        code = run_demo(DemoSettings(), options.artifact, options.output, console)
    except (PwError, OSError, httpx.HTTPError) as error:
        print(f"error: {error}", file=sys.stderr)
        if hint := getattr(error, "hint", None):
            print(f"hint: {hint}", file=sys.stderr)
        return 1
    console.print(f"{time.monotonic() - started:.0f} s in all", highlight=False)
    return code


def make_artifact(artifact: Path, overwrite: bool, console: Console) -> None:
    """Calibrate the bundled model and fit residuals; stages that are done are not done again."""
    console.rule("1. calibrate the bundled model and fit residuals", align="left")
    flags = ["--overwrite"] if overwrite else []
    run_command(["calibrate", MODEL, "-o", str(artifact), *flags])
    run_command(["fit-residuals", str(artifact), *flags])


def run_demo(settings: DemoSettings, artifact: Path, output: Path, console: Console) -> int:
    """Serve an artifact under the load, score what it did, report and check.

    Returns:
        See `main`.
    """
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)

    console.rule("2. serve it under a load that does not fit", align="left")
    store = Artifact.open(artifact)
    budget = settings.tight_budget(artifact, store.max_bits)
    trace = output / "trace.jsonl"
    with serving(settings.serve_arguments(artifact, budget, trace), output / "server.log") as url:
        run = asyncio.run(run_load(settings, url, console))
    plot_timeline(run.timeline, pages_in_words(run), output / "timeline.png")

    console.rule("3. score the widths that the run had", align="left")
    comparison = compare(settings, store, trace, run, output, console)

    console.rule("4. results", align="left")
    checks = [*run_checks(run), *quality_checks(comparison)]
    print_run(console, run, budget)
    console.print()
    print_quality(console, comparison, settings.chunk_tokens)
    console.print()
    print_checks(console, checks)
    write_results(output / "results.json", run, budget, comparison, checks)
    console.print(
        f"\npicture: {output / 'timeline.png'}   all numbers: {output / 'results.json'}",
        highlight=False,
    )
    return 0 if all(check.passed for check in checks) else 1


async def run_load(settings: DemoSettings, url: str, console: Console) -> Run:
    """Send all waves, with quiet between them, while the status is followed and shown."""
    view = View(console, settings.requests)
    answers: list[Answer] = []
    passages = Passages(heldout_documents()[0])
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=30.0) as client:
        observer = Observer(client, view.show, settings.sample_seconds)
        with view.open():
            before = await send(client, _PROBE, _PROBE_TOKENS, logprobs=True)
            first = await observer.sample()
            following = asyncio.create_task(observer.follow())
            try:
                await asyncio.sleep(settings.quiet_seconds)
                for number, wave in enumerate(settings.waves):
                    observer.timeline.mark(wave.name)
                    await run_wave(client, wave, passages, 1000 * number, answers.append)
                    observer.timeline.mark(QUIET)
                    await observer.settle(first.mean_bits, settings.settle_seconds)
                    await asyncio.sleep(settings.quiet_seconds)
            finally:
                following.cancel()
                with suppress(asyncio.CancelledError):
                    await following
            after = await send(client, _PROBE, _PROBE_TOKENS, logprobs=True)
    return Run(observer.timeline, answers, settings.requests, before, after)


def compare(
    settings: DemoSettings, store: Artifact, trace: Path, run: Run, output: Path, console: Console
) -> Comparison:
    """Score the unquantized model, each uniform width and the widths of the run."""
    torch.set_num_threads(1)  # as the server's, see `process`
    chunks = scored_chunks(settings, store.path)
    scorer = Scorer(store.path, chunks, settings.kv_cache_dtype)

    def score(policy: str) -> Score:
        result = scorer.policy(PrecisionPolicy.parse(policy))
        console.print(f"{policy:<10} perplexity {result.perplexity:.3f}", highlight=False)
        return result

    dense = score("dense")
    uniform = tuple(score(f"static:{b}") for b in range(store.min_bits, store.max_bits + 1))
    geometry = store.geometry
    steps = spread(run.timeline.last.step, settings.snapshots)
    snapshots = bits_at(read_replay(trace), geometry, steps)
    adaptive = scorer.snapshots(snapshots, geometry, output / "snapshots")
    console.print(f"{'adaptive':<10} perplexity {adaptive.perplexity:.3f}", highlight=False)
    equal = at_equal_bytes(dense, uniform, adaptive.expert_bytes)
    return Comparison(dense, uniform, adaptive, equal, len(snapshots))


def scored_chunks(settings: DemoSettings, artifact: Path) -> list[list[int]]:
    """Chunks of held-out text, spread evenly over all of it."""
    tokenizer = load_tokenizer(artifact)
    text = "\n\n".join(heldout_documents()[1])
    chunks = cut_chunks(tokenizer.encode(text, add_special_tokens=False), settings.chunk_tokens)
    return [chunks[index] for index in spread(len(chunks), settings.chunks)]


if __name__ == "__main__":
    sys.exit(main())
