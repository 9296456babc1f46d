"""How much more than the average text a prompt suffers from each block: eta [L, E, 2].

    y_i(prompt) = log s_i(prompt) - log s_i,      eta_i = exp(clamp(y_i))       (DESIGN section 5)

Two ways to y (ALGORITHMS 1.3, 1.10; the paper does not publish its own target):

- `ResidualHeads`: one linear head per block on features of the prompt, fitted offline;
- `ExactResidual`: the diagonal score separates into moments of the prompt and column energies,

      s_i^b(prompt) = SUM_j h_j(prompt) * c[i, b, j],     c[i, b, j] = SUM_rows (W - W^(b))^2

  so that with z_ij = mean over b of c[i, b, j] / s_i^b, eta_i = SUM_j h_j(prompt) * z_ij is one dot
  product, and exactly 1 for the calibration text. It is also the oracle for the heads.

Whatever comes in, eta is finite and within [exp(-clamp), exp(clamp)]; a block without evidence has
eta 1. Requests of a batch share weights, so `merge` averages theirs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pw.blocks import MODULES
from pw.errors import StoreError
from pw.planning.ladder import FloatArray
from pw.store.tables import Table

_Floats = npt.NDArray[np.floating]


@dataclass(frozen=True)
class ResidualHeads:
    """Linear heads. A head that lost to zero on the validation prompts predicts 0 (eta 1)."""

    coef: npt.NDArray[np.float32]  # [L, 2E, F], head order (expert, module); dropped heads are 0
    intercept: npt.NDArray[np.float32]  # [L, 2E]
    clamp: float  # |log eta| at most

    @classmethod
    def from_table(cls, table: Table, clamp: float) -> ResidualHeads:
        """Read the artifact's table `residuals`: coef [L, 2E, F], intercept and kept [L, 2E].

        Raises:
            StoreError: An array is missing, of another shape, or not finite in a kept head.
        """
        try:
            coef, intercept, kept = (table.arrays[k] for k in ("coef", "intercept", "kept"))
        except KeyError as error:
            raise StoreError(
                f"table `residuals` has no array `{error.args[0]}`",
                "fit again with `pw fit-residuals`",
            ) from error
        if coef.ndim != 3 or coef.shape[:2] != intercept.shape or kept.shape != intercept.shape:
            raise StoreError(
                "table `residuals` has shapes that disagree: "
                f"coef {coef.shape}, intercept {intercept.shape}, kept {kept.shape}"
            )
        kept = kept.astype(np.bool_)
        if not (np.isfinite(coef[kept]).all() and np.isfinite(intercept[kept]).all()):
            raise StoreError("table `residuals` holds numbers that are not finite")
        return cls(
            np.where(kept[..., None], coef, 0).astype(np.float32),
            np.where(kept, intercept, 0).astype(np.float32),
            clamp,
        )

    def predict(self, features: _Floats) -> FloatArray:
        """Predict eta [L, E, 2] of a prompt with features [L, F] (`pw.models.features`)."""
        if features.shape != (self.coef.shape[0], self.coef.shape[2]):
            raise ValueError(f"features have shape {features.shape}, heads {self.coef.shape}")
        column = features.astype(np.float32)[..., None]  # [L, F, 1]
        with np.errstate(over="ignore", invalid="ignore"):
            log_eta = np.matmul(self.coef, column)[..., 0] + self.intercept
        return bounded_exp(log_eta, self.clamp).reshape(len(self.coef), -1, len(MODULES))


class ExactResidual:
    """eta from a prompt's own second moments, by column energies.

    Args:
        energies: Per module, column energies of the dW of each width: gate_up [L, E, W, H],
            down [L, E, W, I].
        moments: Per module, mean squared inputs over the calibration tokens of each expert:
            gate_up [L, E, H], down [L, E, I].
        clamp: |log eta| at most.
        prior: A prompt that routed n tokens to an expert counts with n / (n + prior) against the
            calibration text (ALGORITHMS 1.10, shrinkage).
    """

    def __init__(
        self,
        energies: tuple[_Floats, _Floats],
        moments: tuple[_Floats, _Floats],
        clamp: float,
        prior: float = 4.0,
    ) -> None:
        self.clamp, self.prior = clamp, prior
        self._weights = tuple(
            _relative_energies(energy, moment)
            for energy, moment in zip(energies, moments, strict=True)
        )

    def eta(self, moments: tuple[_Floats, _Floats], tokens: _Floats) -> FloatArray:
        """Measure eta [L, E, 2] of a prompt.

        Args:
            moments: Mean squared inputs over the prompt's tokens of each expert: [L, E, H] and
                [L, E, I]; rows without tokens are not read.
            tokens: [L, E] tokens that the prompt routed to each expert.
        """
        share = tokens / (tokens + self.prior) if self.prior else (tokens > 0).astype(np.float64)
        modules = []
        for weights, moment in zip(self._weights, moments, strict=True):
            ratio = np.einsum("lej,lej->le", weights, moment)
            measured = np.isfinite(ratio) & (ratio > 0) & (tokens > 0)
            log_eta = np.log(np.where(measured, ratio, 1.0))
            # Without energy or moments offline the weights are 0: no evidence.
            modules.append(bounded_exp(np.where(measured, share * log_eta, 0.0), self.clamp))
        return np.stack(modules, axis=-1)


def merge(etas: Sequence[FloatArray], weights: Sequence[float]) -> FloatArray | None:
    """One eta for the requests of a batch: their mean by expected remaining tokens.

    Damage is linear in eta and adds up over tokens, hence the arithmetic mean. Requests with
    weight <= 0 do not count, unless all are such; None without requests.
    """
    if not etas:
        return None
    share = np.maximum(np.asarray(weights, dtype=np.float64), 0.0)
    if not 0 < share.sum() < math.inf:
        share = np.ones(len(etas))
    return np.asarray(np.tensordot(share / share.sum(), np.stack(etas), axes=1))


def bounded_exp(log_eta: _Floats, clamp: float) -> FloatArray:
    """Exponentials of values limited to [-clamp, clamp]; NaN counts as 0."""
    limited = np.clip(np.nan_to_num(log_eta.astype(np.float64), nan=0.0), -clamp, clamp)
    return np.asarray(np.exp(limited))


def _relative_energies(energy: _Floats, moment: _Floats) -> npt.NDArray[np.float32]:
    """Mean [L, E, K] of c / s over the widths whose s is positive: the z of this module."""
    score = np.einsum("lewj,lej->lew", energy, moment, dtype=np.float64)
    usable = np.isfinite(score) & (score > 0)
    inverse = np.divide(1.0, score, out=np.zeros_like(score), where=usable)
    inverse /= np.maximum(usable.sum(axis=2, keepdims=True), 1)
    relative: npt.NDArray[np.float32] = np.einsum("lewj,lew->lej", energy, inverse).astype(
        np.float32
    )
    return relative
