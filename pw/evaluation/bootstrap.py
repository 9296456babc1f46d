"""Bootstrap intervals of means and of paired differences of means. Knows no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pw.errors import ConfigError

_BATCH = 1 << 22  # resampled values in memory at a time


@dataclass(frozen=True)
class Interval:
    """A mean and the percentile interval of its bootstrap distribution."""

    mean: float
    low: float
    high: float
    level: float

    def __str__(self) -> str:
        return f"{self.mean:+.4f} [{self.low:+.4f}, {self.high:+.4f}]"


def mean_interval(
    values: Sequence[float], *, level: float = 0.95, draws: int = 10_000, seed: int = 0
) -> Interval:
    """Interval of the mean of independent values (chunks, items).

    Args:
        values: One number per independent unit; tokens of one chunk are not independent.
        level: Coverage, such as 0.95.
        draws: Resamples.
        seed: Same seed, same interval.
    """
    sample = np.asarray(values, dtype=np.float64)
    if not sample.size:
        raise ConfigError("no values to take an interval of")
    rng = np.random.default_rng(seed)
    rows = max(1, _BATCH // sample.size)
    means = np.concatenate(
        [
            sample[rng.integers(sample.size, size=(min(rows, draws - done), sample.size))].mean(1)
            for done in range(0, draws, rows)
        ]
    )
    tail = (1 - level) / 2
    low, high = np.quantile(means, (tail, 1 - tail))
    return Interval(float(sample.mean()), float(low), float(high), level)


def paired_interval(
    values: Sequence[float],
    baseline: Sequence[float],
    *,
    level: float = 0.95,
    draws: int = 10_000,
    seed: int = 0,
) -> Interval:
    """Interval of mean(values - baseline), unit by unit: far tighter than two separate ones.

    Raises:
        ConfigError: The two do not have the same number of units.
    """
    if len(values) != len(baseline):
        raise ConfigError(
            f"paired comparison needs the same chunks: {len(values)} against {len(baseline)}",
            "evaluate both on the same text with the same --seqlen and --max-chunks",
        )
    differences = np.subtract(values, baseline, dtype=np.float64)
    return mean_interval(differences.tolist(), level=level, draws=draws, seed=seed)
