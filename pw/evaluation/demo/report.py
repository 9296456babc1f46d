"""The demo's last page: what the run did, what it cost in quality, what held."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pw.evaluation.demo.checks import Check, Run
from pw.evaluation.demo.scoring import Comparison, Score
from pw.evaluation.demo.view import mebibytes

_MEBI = 2**20


def print_run(console: Console, run: Run, budget: int) -> None:
    """Requests, bits, pages and bytes of the load."""
    table = Table("the run", "", box=None, title_justify="left", padding=(0, 3, 0, 0))
    for label, value in run_rows(run, budget):
        table.add_row(label, value)
    console.print(table)


def run_rows(run: Run, budget: int) -> list[tuple[str, str]]:
    """The lines of the first table."""
    timeline, first, last = run.timeline, run.timeline.first, run.timeline.last
    finished = [answer for answer in run.answers if answer.finished]
    shares = [f"{share:.0%} at {width}" for width, share in timeline.time_by_bits().items()]
    peak = max(timeline.samples, key=lambda sample: sample.pages_kv)
    kinds = [plan.kind for plan in timeline.plans]
    rows = [
        (
            "requests",
            f"{len(finished)} finished, {run.requests - len(finished)} failed, "
            f"{last.preemptions - first.preemptions} preempted and computed again",
        ),
        ("tokens made", f"{sum(answer.tokens_made for answer in run.answers):,}"),
        (
            "mean bits",
            f"{first.mean_bits:.2f} at the start, {timeline.least_bits():.2f} at the least, "
            f"{last.mean_bits:.2f} at the end",
        ),
        ("time by bits", ", ".join(reversed(shares))),
        (
            "pages",
            f"{first.pages_total:,} of {first.page_bytes:,} bytes: {first.pages_weights} of "
            f"weights at the start, {peak.pages_weights} beside the most KV ({peak.pages_kv})",
        ),
        (
            "moved",
            f"{(last.bytes_released - first.bytes_released) / _MEBI:.1f} MiB released, "
            f"{(last.bytes_reloaded - first.bytes_reloaded) / _MEBI:.1f} MiB reloaded, by "
            f"{kinds.count('release')} releases, {kinds.count('reload')} reloads, "
            f"{kinds.count('trade')} trades",
        ),
        (
            "bytes over budget",
            f"{max(s.bytes_over_budget for s in timeline.samples)} of {budget:,}",
        ),
    ]
    if finished:
        wait = statistics.median(answer.first_token_seconds for answer in finished)
        rows.insert(2, ("first token", f"after {wait * 1e3:.0f} ms (median)"))
    return rows


def print_quality(console: Console, comparison: Comparison, tokens: int) -> None:
    """Perplexity beside the bytes of the experts, then all bytes by class."""
    dense, adaptive = comparison.dense, comparison.adaptive
    table = _table(f"held-out perplexity, {len(dense.nll)} chunks of {tokens} tokens")
    for heading in ("mean bits", "experts, MiB", "share", "perplexity"):
        table.add_column(heading, justify="right")
    table.add_column("loss over unquantized, nats a token [95 %]")
    whole = dense.expert_bytes.mean()
    rows = [
        (each.policy, f"{each.bits.mean():.2f}", each.expert_bytes, each.nll)
        for each in _scores(comparison)
    ]
    rows.append(("uniform, same bytes", "", adaptive.expert_bytes, comparison.equal_bytes))
    for policy, bits, size, nll in rows:
        table.add_row(
            policy,
            bits,
            f"{size.mean() / _MEBI:.2f}",
            f"{size.mean() / whole:.0%}",
            f"{math.exp(nll.mean()):.3f}",
            "" if nll is dense.nll else str(comparison.over_dense(nll)),
            style="bold" if nll is adaptive.nll else "",
        )
    console.print(table)
    console.print(
        f"adaptive: {comparison.snapshots} snapshots of the widths that the run had, evenly spread "
        "over its steps; each scores its share of the chunks.\n"
        "uniform, same bytes: between the two uniform widths around the bytes of each snapshot.\n"
        f"adaptive minus that: {comparison.against_equal_bytes} nats a token, paired by chunk; "
        "below zero is better.\n",
        highlight=False,
        soft_wrap=True,
    )
    console.print(bytes_table(comparison))


def bytes_table(comparison: Comparison) -> Table:
    """All bytes that were charged while scoring, without KV, in MiB."""
    table = _table("MiB by class while scoring, KV and free pages left out")
    for heading in ("planes", "LUTs", "unquantized", "padding", "other weights"):
        table.add_column(heading, justify="right")
    for heading in ("tables", "workspace", "sum"):
        table.add_column(heading, justify="right")
    for score in _scores(comparison):
        held = score.bytes
        sizes = (
            *(held.planes, held.luts, held.experts_dense, held.padding, held.dense),
            *(held.tables, held.workspace, held.total - held.kv - held.free),
        )
        table.add_row(score.policy, *(f"{size / _MEBI:.2f}" for size in sizes))
    table.caption = "padding is inside the pages of planes and LUTs"
    return table


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.caption_justify = "left"
    table.add_column("policy")
    return table


def _scores(comparison: Comparison) -> tuple[Score, ...]:
    return (comparison.dense, *comparison.uniform, comparison.adaptive)


def print_checks(console: Console, checks: Sequence[Check]) -> None:
    """One line per check."""
    for check in checks:
        verdict = "[green]ok[/]    " if check.passed else "[bold red]FAILED[/]"
        console.print(f"{verdict} {check.name}: {check.found}", highlight=False, soft_wrap=True)


def write_results(
    path: Path, run: Run, budget: int, comparison: Comparison, checks: Sequence[Check]
) -> None:
    """The same as JSON, with every sample and every chunk, to be looked at again."""
    samples = [asdict(sample) for sample in run.timeline.samples]
    for sample in samples:
        del sample["plan_history"]
    content = {
        "budget": budget,
        "checks": [asdict(check) for check in checks],
        "run": dict(run_rows(run, budget)),
        "answers": [asdict(answer) for answer in run.answers],
        "scores": [_plain(score) for score in _scores(comparison)],
        "uniform_at_equal_bytes_nll": comparison.equal_bytes.tolist(),
        "adaptive_minus_equal_bytes": asdict(comparison.against_equal_bytes),
        "samples": samples,
        "plans": [asdict(plan) for plan in run.timeline.plans],
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _plain(score: Score) -> dict[str, Any]:
    return {
        "policy": score.policy,
        "perplexity": score.perplexity,
        "nll": score.nll.tolist(),
        "bits": score.bits.tolist(),
        "expert_bytes": score.expert_bytes.tolist(),
        "bytes": asdict(score.bytes),
    }


def pages_in_words(run: Run) -> str:
    """Title of the picture."""
    first = run.timeline.first
    return (
        f"One arena of {mebibytes(first, first.pages_total):.1f} MiB: experts give pages to the KV "
        "cache under load and take them back"
    )
