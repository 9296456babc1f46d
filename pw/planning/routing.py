"""How much of each layer's router weight every expert receives. Decides nothing.

The paper's routing mass over a window of recent tokens t, slots k, chosen expert z, router weight r
(ALGORITHMS 1.3):

    m[l, e] = SUM_t SUM_k r[l, t, k] * 1{z[l, t, k] = e}  /  SUM_t SUM_k r[l, t, k]

The window is an exponential one: sums decay by exp(-tokens / window). One window is noisy (a token
routes to 4 of 60), so the online share is shrunk toward the offline trace in units of tokens:

    m = (n * online + n0 * offline) / (n + n0),     n = decayed tokens, n0 = `prior`

Every row of `mass()` sums to 1 and is finite, whatever came in.
"""

from __future__ import annotations

import math
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from pw.planning.ladder import FloatArray


class Bucket(IntEnum):
    """How busy an expert is, by mass relative to what is expected of it."""

    COLD = 0
    WARM = 1
    HOT = 2


class RoutingStats:
    """Decayed routing mass per (layer, expert).

    Args:
        layers: Number of MoE layers L.
        experts: Experts per layer E.
        window: Tokens after which a count has decayed to 1/e.
        prior: Tokens' worth of the offline trace.
        offline: [L, E] router weight sums of the trace in any scale; None: uniform.
    """

    def __init__(
        self,
        layers: int,
        experts: int,
        window: float,
        prior: float,
        offline: npt.NDArray[np.floating] | None = None,
    ) -> None:
        if window <= 0 or prior < 0:
            raise ValueError(f"window must be > 0 and prior >= 0: {window}, {prior}")
        shape = (layers, experts)
        if offline is not None and offline.shape != shape:
            raise ValueError(f"offline trace has shape {offline.shape}, expected {shape}")
        self.window, self.prior = float(window), float(prior)
        self.tokens = 0.0  # decayed count
        self._sums = np.zeros(shape)
        self._seen = np.zeros(shape, dtype=bool)
        uniform = np.full(shape, 1.0 / experts)
        self._offline = uniform if offline is None else _shares(_clean(offline), uniform)

    def update(self, mass_sums: npt.NDArray[np.floating], tokens: int) -> None:
        """Take in the router weights [L, E] summed over `tokens` tokens.

        Weights that are not finite or negative count as 0: one bad token must not stay for a
        whole window.
        """
        if mass_sums.shape != self._sums.shape:
            raise ValueError(f"mass has shape {mass_sums.shape}, expected {self._sums.shape}")
        if tokens <= 0:
            return
        decay = math.exp(-tokens / self.window)
        new = _clean(mass_sums)
        self._sums = self._sums * decay + new
        self._seen |= new > 0
        self.tokens = self.tokens * decay + tokens

    @property
    def never_routed(self) -> int:
        """Experts, of all layers, that no token has gone to since the start."""
        return int((~self._seen).sum())

    @property
    def offline(self) -> FloatArray:
        """Share [L, E] of each layer's router weight in the offline trace."""
        return self._offline

    def mass(self) -> FloatArray:
        """Share [L, E] of each layer's router weight, shrunk toward the offline trace."""
        if self.tokens == 0:
            return self._offline.copy()
        online = _shares(self._sums, self._offline)
        weight = self.tokens / (self.tokens + self.prior)
        return weight * online + (1.0 - weight) * self._offline


def buckets(
    mass: FloatArray,
    hot_mass: float,
    cold_mass: float,
    expected: FloatArray | None = None,
) -> npt.NDArray[np.int8]:
    """Bucket [L, E] of every expert: mass relative to what is expected of it at or above `hot_mass`
    is hot, below `cold_mass` cold, else warm.

    Args:
        mass: [L, E] shares.
        hot_mass: Threshold.
        cold_mass: Threshold.
        expected: [L, E] shares; None: uniform, 1/E. An expert that nothing was expected of counts
            as one of a tenth of the uniform share.
    """
    uniform = 1.0 / mass.shape[1]
    relative = mass / (uniform if expected is None else np.maximum(expected, 0.1 * uniform))
    return np.where(
        relative >= hot_mass, Bucket.HOT, np.where(relative < cold_mass, Bucket.COLD, Bucket.WARM)
    ).astype(np.int8)


def _clean(sums: npt.NDArray[np.floating]) -> FloatArray:
    usable = np.isfinite(sums) & (sums > 0)
    return np.where(usable, sums, 0.0).astype(np.float64)


def _shares(sums: FloatArray, fallback: FloatArray) -> FloatArray:
    total = sums.sum(axis=1, keepdims=True)
    return np.where(
        total > 0, np.divide(sums, total, out=np.zeros_like(sums), where=total > 0), fallback
    )
