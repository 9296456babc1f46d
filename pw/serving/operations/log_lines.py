"""The lines that operators read: one a request, one each ten seconds of work, the memory plan.

Every line carries its numbers as fields, see `pw.logs`. No line has a prompt, an answer or a key.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from pw.config import format_bytes
from pw.engine.request import BytesByClass, EngineStatus

logger = logging.getLogger("pw.serving")
stats_logger = logging.getLogger("pw.serving.stats")

STATS_SECONDS = 10.0
_CLASSES = {
    "dense": "weights that keep their width",
    "experts_dense": "experts, unquantized",
    "planes": "experts, bit-planes",
    "luts": "experts, lookup tables",
    "kv": "KV cache, in use",
    "free": "pages free for planes or KV",
    "tables": "page and block tables",
    "workspace": "scratch, activations, sums of ranks",
}


@dataclass(frozen=True)
class RequestRecord:
    """One request at its end. Seconds from its arrival; None where it did not come so far."""

    request_id: str
    sequences: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    finish_reason: str  # all of its sequences', joined by commas
    queue_seconds: float | None
    ttft_seconds: float | None
    e2e_seconds: float
    bits_start: float | None  # mean committed bits with the first token; None without one
    bits_end: float | None
    bits_min: int | None  # least of any block at any step


def log_request(record: RequestRecord) -> None:
    """One line about one request."""
    logger.info(
        "%s: sequences %d, tokens in %d, out %d, finish %s, queue %s, ttft %s, e2e %.3f s, bits %s",
        *(record.request_id, record.sequences, record.prompt_tokens, record.generated_tokens),
        *(record.finish_reason, _seconds(record.queue_seconds), _seconds(record.ttft_seconds)),
        *(record.e2e_seconds, _bits(record)),
        extra={"fields": {"event": "request", **asdict(record)}},
    )


class StatsLine:
    """The engine's throughput and memory, a line each ten seconds in which something happened."""

    def __init__(self, interval: float = STATS_SECONDS) -> None:
        self._interval = interval
        self._last: tuple[EngineStatus, float] | None = None

    def observe(self, status: EngineStatus, now: float) -> None:
        """Write the line if it is due; `now` in monotonic seconds."""
        if self._last is None:
            self._last = (status, now)
            return
        before, then = self._last
        if now - then < self._interval:
            return
        self._last = (status, now)
        if status.running or status.waiting or status.step != before.step:
            self._write(status, before, now - then)

    def _write(self, status: EngineStatus, before: EngineStatus, seconds: float) -> None:
        kv_pages = status.pages_kv + status.pages_free
        weights = status.bytes.planes + status.bytes.luts + status.bytes.experts_dense
        fields = {
            "event": "stats",
            "running": status.running,
            "waiting": status.waiting,
            "kv_usage": status.pages_kv / kv_pages if kv_pages else 0.0,
            "prompt_tokens_per_second": (status.prompt_tokens - before.prompt_tokens) / seconds,
            "generation_tokens_per_second": (
                (status.generation_tokens - before.generation_tokens) / seconds
            ),
            "weight_bytes": weights,
            "mean_bits": status.mean_bits,
            "plans": status.plans - before.plans,
            "preemptions": status.preemptions - before.preemptions,
        }
        stats_logger.info(
            "Avg prompt throughput: %(prompt_tokens_per_second).1f tokens/s, "
            "Avg generation throughput: %(generation_tokens_per_second).1f tokens/s, "
            "Running: %(running)d reqs, Waiting: %(waiting)d reqs, "
            "KV cache usage: %(kv_percent).1f%%, weights: %(weights)s, "
            "mean bits: %(mean_bits).2f, plans: %(plans)d, preemptions: %(preemptions)d",
            {
                **fields,
                "kv_percent": 100 * status.pages_kv / kv_pages if kv_pages else 0.0,
                "weights": format_bytes(weights),
            },
            extra={"fields": fields},
        )


def memory_plan(status: EngineStatus, concurrency: Mapping[str, float]) -> str:
    """Where the budget goes, as a table for the start of a server.

    Args:
        status: At the start.
        concurrency: `EngineInfo.concurrency`.
    """
    held = status.bytes
    rows = [(name, getattr(held, name), about) for name, about in _CLASSES.items()]
    lines = [
        f"memory plan: {format_bytes(held.total)} of a budget of {format_bytes(held.budget)}",
        *(
            f"  {name:<14}{format_bytes(number):>12}{number / max(1, held.budget):>8.1%}  {about}"
            for name, number, about in rows
            if number
        ),
        *_ranks(status),
        f"  {status.pages_total:,} pages of {format_bytes(status.page_bytes)}, contexts up to "
        f"{status.max_model_len:,} tokens, policy {status.policy}, "
        f"mean {status.mean_bits:.2f} bits",
        f"  maximum concurrency for {status.max_model_len:,} tokens per request: "
        + ", ".join(f"{number:.2f}x at {widths}" for widths, number in concurrency.items()),
    ]
    return "\n".join(lines)


def _ranks(status: EngineStatus) -> list[str]:
    """What the table means where several ranks share the model."""
    if not status.ranks:
        return []
    dense = ", ".join(format_bytes(rank.dense) for rank in status.ranks)
    return [
        f"  on each of {len(status.ranks)} ranks; weights that keep their width: {dense}, of which "
        f"embedding and head {format_bytes(status.replicated)}, whole on each"
    ]


def memory_plan_fields(status: EngineStatus, concurrency: Mapping[str, float]) -> dict[str, object]:
    """The same for a line of JSON."""
    names = [name for name in vars(BytesByClass()) if name not in ("padding", "budget")]
    return {
        "event": "memory_plan",
        "policy": status.policy,
        "budget_bytes": status.bytes.budget,
        "ranks": max(1, len(status.ranks)),
        **{f"{name}_bytes": getattr(status.bytes, name) for name in names},
        "page_bytes": status.page_bytes,
        "pages": status.pages_total,
        "max_model_len": status.max_model_len,
        "mean_bits": status.mean_bits,
        "concurrency": {widths: round(number, 2) for widths, number in concurrency.items()},
    }


def _bits(record: RequestRecord) -> str:
    if record.bits_start is None or record.bits_end is None:
        return "-"
    return f"{record.bits_start:.2f} to {record.bits_end:.2f}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"
