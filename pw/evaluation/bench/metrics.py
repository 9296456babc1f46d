"""From the moments at which tokens came to the figures that users of vLLM's benchmarks know.

ttft is the time to the first token, tpot the mean time per token after it, itl each gap between two
deliveries, e2el the whole request. All in milliseconds, under vLLM's key names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pw.engine.request import RequestOutput
from pw.errors import ConfigError

METRICS = ("ttft", "tpot", "itl", "e2el")


@dataclass
class Timing:
    """What happened to one request. Times are seconds of one monotonic clock."""

    started: float
    first: float | None = None  # first token
    last: float | None = None
    gaps: list[float] = field(default_factory=list)  # between deliveries
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None

    def token(self, now: float) -> None:
        """Something was delivered."""
        if self.first is None:
            self.first = now
        elif self.last is not None:
            self.gaps.append(now - self.last)
        self.last = now

    def take(self, now: float, output: RequestOutput) -> None:
        """Note what a step of an engine gave."""
        if output.token_ids:
            self.token(now)
        self.output_tokens, self.cached_tokens = output.completion_tokens, output.cached_tokens
        self.error = output.error

    def milliseconds(self, metric: str) -> list[float]:
        """Values of one of METRICS; empty where it has none."""
        if self.first is None or self.last is None:
            return []
        if metric == "itl":
            return [gap * 1e3 for gap in self.gaps]
        if metric == "tpot":
            after = self.output_tokens - 1
            return [(self.last - self.first) / after * 1e3] if after > 0 else []
        return [((self.first if metric == "ttft" else self.last) - self.started) * 1e3]


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """Limits in milliseconds from `ttft:500 tpot:50`.

    Raises:
        ConfigError: A pair is not of that form.
    """
    limits = {}
    for pair in (part for text in pairs for part in text.split()):
        name, _, value = pair.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = 0.0
        if name not in ("ttft", "tpot", "e2el") or not limits[name] > 0:
            raise ConfigError(
                f"not a goodput limit: `{pair}`", "write ttft:500, tpot:50 or e2el:9000 (ms)"
            )
    return limits


def summarize(
    timings: Sequence[Timing],
    duration: float,
    *,
    metrics: Sequence[str] = METRICS,
    percentiles: Sequence[float] = (50, 90, 99),
    goodput: dict[str, float] | None = None,
) -> dict[str, Any]:
    """Figures of a run; failed requests are counted and nothing else of them.

    Args:
        timings: One for each request.
        duration: Seconds from the first request to the last token.
        metrics: Which of METRICS.
        percentiles: Of each.
        goodput: Limits in milliseconds that a good request keeps.
    """
    good = [timing for timing in timings if timing.error is None]
    inputs = sum(timing.input_tokens for timing in good)
    outputs = sum(timing.output_tokens for timing in good)
    found: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(timings) - len(good),
        "errors": sorted({timing.error for timing in timings if timing.error is not None})[:5],
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "total_cached_tokens": sum(timing.cached_tokens for timing in good),
        "request_throughput": len(good) / duration,
        "output_throughput": outputs / duration,
        "total_token_throughput": (inputs + outputs) / duration,
    }
    if goodput:
        kept = sum(
            all(value <= limit for name, limit in goodput.items() for value in t.milliseconds(name))
            for t in good
        )
        found["request_goodput"] = kept / duration
    for metric in metrics:
        values = [value for timing in good for value in timing.milliseconds(metric)]
        found |= distribution(values, metric, percentiles)
    return found


def distribution(
    values: Sequence[float], name: str, percentiles: Sequence[float]
) -> dict[str, float]:
    """Mean, median, standard deviation and percentiles of milliseconds, keys as in vLLM."""
    if not values:
        return {}
    found = {
        f"mean_{name}_ms": float(np.mean(values)),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(np.std(values)),
    }
    for percentile in percentiles:
        found[f"p{percentile:g}_{name}_ms"] = float(np.percentile(values, percentile))
    return found
