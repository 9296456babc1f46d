"""What is known of every block before serving: widths, bytes and offline sensitivity.

Knows no routing and no prompt. Blocks are in geometry order: (layer slot, expert, module).

A block whose sensitivity was not measured (no calibration token reached its expert: a row that is
all zero or not finite) is not free to crush, since it may be hot on other text. It gets the median
of its layer and module, or of the module over all layers (RELIABILITY section 5, rule 4). A dead
row in an artifact made by `pw_pipelines` is already filled; this is the runtime's own guard.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pw.blocks import MODULES, ExpertGeometry
from pw.errors import StoreError
from pw.planning.ladder import BoolArray, FloatArray, IntArray
from pw.store.tables import Table


@dataclass(frozen=True)
class BlockTable:
    """Costs and sensitivities of n = L * E * 2 blocks at W widths."""

    geometry: ExpertGeometry
    widths: IntArray  # [W] ascending bits
    cost_bytes: IntArray  # [n, W] planes + LUT in whole pages
    sensitivity: FloatArray  # [n, W] >= 0, one unit over all layers, unmeasured rows filled
    measured: BoolArray  # [n] rows that were not filled

    def __post_init__(self) -> None:
        shape = (self.geometry.blocks, len(self.widths))
        if self.cost_bytes.shape != shape or self.sensitivity.shape != shape:
            raise ValueError(
                f"expected arrays {shape}: cost {self.cost_bytes.shape}, "
                f"sensitivity {self.sensitivity.shape}"
            )

    @property
    def layer_of(self) -> IntArray:
        """Layer slot [n] of every block."""
        per_layer = self.geometry.experts * len(MODULES)
        return np.repeat(np.arange(len(self.geometry.layers)), per_layer)

    @classmethod
    def from_artifact(
        cls,
        sensitivity: Table,
        metric: str,
        geometry: ExpertGeometry,
        cost_bytes: IntArray,
        widths: IntArray,
    ) -> BlockTable:
        """Take one metric of the artifact's table `sensitivity` at the widths that are served.

        Args:
            sensitivity: Arrays `<metric>` [L, E, 2, W'], attribute `widths` [W'].
            metric: "output_gradient" or "hessian".
            geometry: Blocks of the model.
            cost_bytes: [n, W] from the memory layout.
            widths: [W] ascending, a subset of the artifact's.

        Raises:
            StoreError: The table lacks the metric, a width, or the shape of this model.
        """
        scores = sensitivity.arrays.get(metric)
        measured = [int(width) for width in sensitivity.attrs.get("widths", ())]
        expected = (len(geometry.layers), geometry.experts, len(MODULES), len(measured))
        if scores is None or scores.shape != expected:
            found = None if scores is None else scores.shape
            raise StoreError(
                f"table `sensitivity` has `{metric}` of shape {found}: expected {expected}",
                "measure again with `pw sensitivity`",
            )
        absent = sorted(set(widths.tolist()) - set(measured))
        if absent:
            raise StoreError(
                f"table `sensitivity` lacks width {absent[0]}: it has {measured}",
                "measure again with `pw sensitivity`",
            )
        chosen = scores[..., [measured.index(width) for width in widths.tolist()]]
        chosen = chosen.astype(np.float64)
        filled = fill_unmeasured(chosen).reshape(geometry.blocks, len(widths))
        return cls(geometry, widths, cost_bytes, filled, was_measured(chosen).ravel())


def was_measured(scores: FloatArray) -> BoolArray:
    """Rows [L, E, 2] of scores [L, E, 2, W] that are finite and not all zero."""
    finite = np.isfinite(scores).all(axis=-1)
    return np.asarray(finite & (np.nan_to_num(scores) > 0).any(axis=-1))


def fill_unmeasured(scores: FloatArray) -> FloatArray:
    """Copy of scores [L, E, 2, W] in which rows that were not measured hold medians.

    Negative entries become 0. With nothing measured at all, a row falls by 4 per bit (the error of
    a uniform quantizer), so that planning still spreads bits evenly.
    """
    measured = was_measured(scores)
    scores = np.where(measured[..., None], np.maximum(scores, 0.0), 0.0)
    if measured.all():
        return scores
    for module in range(scores.shape[2]):
        rows, known = scores[:, :, module], measured[:, :, module]
        overall = (
            np.median(rows[known], axis=0) if known.any() else 0.25 ** np.arange(rows.shape[2])
        )
        for layer in range(len(rows)):
            usual = np.median(rows[layer, known[layer]], axis=0) if known[layer].any() else overall
            rows[layer, ~known[layer]] = usual
    return scores
