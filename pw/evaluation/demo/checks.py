"""What must hold after the demo. One failed check makes it exit non-zero."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pw.evaluation.demo.load import Answer
from pw.evaluation.demo.scoring import Comparison
from pw.evaluation.demo.timeline import Timeline

# Nats a token: what timing and the few chunks of a demo may make of two equal policies.
EQUAL_BYTES_TOLERANCE = 0.005


@dataclass(frozen=True)
class Check:
    """One claim and what was found."""

    name: str
    passed: bool
    found: str


@dataclass(frozen=True)
class Run:
    """What the load left behind."""

    timeline: Timeline
    answers: Sequence[Answer]  # of the load
    requests: int  # sent by the load
    before: Answer  # the same greedy request, alone, before and after the load
    after: Answer


def run_checks(run: Run) -> list[Check]:
    """Claims about requests, pages, bytes and bits."""
    timeline, first, last = run.timeline, run.timeline.first, run.timeline.last
    finished = sum(answer.finished for answer in run.answers)
    broken = next((a.error or "an answer is short" for a in run.answers if not a.finished), "")
    widest_and_kv = first.pages_weights + timeline.most_kv_pages()
    over = max(sample.bytes_over_budget for sample in timeline.samples)
    lost = timeline.pages_lost()
    before, after = run.before, run.after
    same = (before.text, before.logprobs) == (after.text, after.logprobs)
    return [
        Check(
            "every request finished",
            finished == run.requests and last.failed == 0,
            f"{finished} of {run.requests}, {last.failed} failed in the engine"
            + (f": {broken}" if broken else ""),
        ),
        Check(
            "the budget was tight: widest experts and the KV of the load do not fit",
            widest_and_kv > first.pages_total,
            f"{first.pages_weights} + {timeline.most_kv_pages()} pages, there are "
            f"{first.pages_total}",
        ),
        Check("bytes stayed within the budget", over == 0, f"{over} bytes over"),
        Check("no page was lost", lost == 0, f"{lost} pages"),
        Check(
            "bits fell under load",
            timeline.least_bits() < first.mean_bits,
            f"from {first.mean_bits:.2f} to {timeline.least_bits():.2f}",
        ),
        Check(
            "bits came back to the widest",
            last.mean_bits == first.mean_bits and last.quiet and last.pages_kv == 0,
            f"{last.mean_bits:.2f} of {first.mean_bits:.2f}, {last.pages_kv} KV pages left",
        ),
        Check(
            "one greedy request has the same tokens and log-probabilities before and after",
            same and before.finished,
            f"{before.tokens_made} tokens, {'equal' if same else 'different'}",
        ),
    ]


def quality_checks(comparison: Comparison) -> list[Check]:
    """Claims about perplexity."""
    narrow, equal = comparison.against_narrowest, comparison.against_equal_bytes
    return [
        Check(
            "adaptive is better than the narrowest uniform width",
            narrow.mean < 0,
            f"{narrow} nats a token",
        ),
        Check(
            "adaptive is not worse than uniform widths of the same bytes",
            equal.low <= EQUAL_BYTES_TOLERANCE,
            f"{equal} nats a token, {EQUAL_BYTES_TOLERANCE} allowed",
        ),
    ]
