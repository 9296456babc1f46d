"""An evaluation as one JSON-ready value; every other form of the report is made from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

from pw.evaluation.sweep import Job, Row, Sweep

FORMAT = "pw-eval-1"
MODULES = ("gate_up", "down")

BYTE_CLASSES = {
    "planes": "bit-planes of the routed experts, in whole pages",
    "luts": "lookup tables of the routed experts, in whole pages",
    "experts_dense": "unquantized routed experts (policy dense only)",
    "dense": "weights that are never quantized: embeddings, attention, router, norms, shared "
    "experts, head",
    "kv": "KV cache, in whole pages",
    "free": "pages of the arena that nothing uses",
    "tables": "page tables of weights and KV",
    "workspace": "scratch of one forward step: activations, logits, dequantized pieces",
    "padding": "the unfilled ends of plane and LUT pages: already counted in planes and luts, not "
    "added again",
    "host": "memory of the host, outside the budget: copies of planes, to be loaded from",
}
INSIDE = ("planes", "luts", "experts_dense", "dense", "kv", "free", "tables", "workspace")


def document(
    sweep: Sweep, job: Job, text: Mapping[str, Any], origin: Mapping[str, Any]
) -> dict[str, Any]:
    """The whole evaluation.

    Args:
        sweep: What was measured.
        job: What was asked.
        text: Of the perplexity: `name` and `sha256`.
        origin: See `pw.evaluation.report.provenance`.
    """
    return {
        "format": FORMAT,
        "provenance": dict(origin),
        "text": {
            **text,
            "chunks": len(job.chunks),
            "chunk_tokens": len(job.chunks[0]),
            "prefix_tokens": len(job.prefix),
            "in_flight": job.concurrency,
        },
        "protocol": PROTOCOL,
        "tasks": [
            {"name": asked.task.name, "sha256": asked.task.sha256, "chance": asked.task.chance}
            | asdict(asked.settings)
            for asked in job.tasks
        ],
        "reference": sweep.reference,
        "budgets": sweep.budgets,
        "byte_classes": BYTE_CLASSES,
        "rows": [_row(row, sweep.budgets) for row in sweep.rows],
    }


PROTOCOL = (
    "Teacher-forced through the serving engine. The text is tokenized once and cut into "
    "non-overlapping chunks, each a context of its own whose first token is not scored; perplexity "
    "= exp(mean over chunks of the mean negative log-probability). KL is that of the dense model's "
    "next-token distribution from the policy's, over the whole vocabulary, mean over the same "
    "tokens. Intervals: 95 %, bootstrap over chunks (items), 10,000 draws, paired for differences. "
    "Bytes are means over the forward steps of the text. Fixed policies are run once without a "
    "limit; a budget given as a policy is the most bytes that its run took."
)


def _row(row: Row, budgets: Mapping[str, int]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "policy": row.policy,
        "fixed": row.fixed,
        "budget": None if row.budget is None else row.budget.name,
        "budget_bytes": row.budget_bytes,
        "error": row.error,
    }
    report = row.report
    if report is None:
        return found
    usage = report.usage
    expert = usage.expert_bytes
    return found | {
        "fits": [name for name, size in budgets.items() if usage.used_peak <= size]
        if row.fixed
        else None,
        "perplexity": report.perplexity,
        "nll": asdict(report.nll),
        "chunk_nll": list(report.chunk_nll),
        "chunk_bits": list(report.chunk_bits),
        "tokens": report.tokens,
        "chunk_tokens": report.chunk_tokens,
        "kl": _plain(report.kl),
        "chunk_kl": None if report.chunk_kl is None else list(report.chunk_kl),
        "kl_quantiles": report.kl_quantiles,
        "against_reference": _plain(row.reference),
        "against_best_fixed": _plain(row.rival),
        "mean_bits": report.mean_bits,
        "widths": asdict(usage.widths),
        "bytes": asdict(usage.bytes) | {"total": usage.bytes.total, "experts": expert},
        "kv_peak_bytes": usage.kv_peak,
        "used_peak_bytes": usage.used_peak,
        "used_single_bytes": usage.used_single,
        "bytes_over_budget": report.bytes_over_budget,
        "preemptions": report.preemptions,
        "transitions": report.transitions,
        "seconds": report.seconds,
        "timeline": [asdict(moment) for moment in usage.timeline],
        "tasks": [_task(result, row) for result in row.tasks],
        "harness": [_without(asdict(result), "samples") for result in row.harness],
    }


def _task(result: Any, row: Row) -> dict[str, Any]:
    differences = row.task_differences.get(result.task, {})
    return _without(asdict(result), "samples") | {
        "against_reference": {name: asdict(value) for name, value in differences.items()}
    }


def _without(record: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != name}


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else None


def varied(row: Mapping[str, Any]) -> bool:
    """Whether blocks of a row had different widths, so that a map of them says something."""
    blocks = row.get("widths", {}).get("blocks") or ()
    widths = {bits for layer in blocks for module in MODULES for bits in layer[module]}
    return len(widths) > 1


def scored(described: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    """Rows that could run."""
    return [row for row in described["rows"] if row["error"] is None]
