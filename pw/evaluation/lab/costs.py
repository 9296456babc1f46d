"""Bytes of every block at every width: as the engine charges them, and as longer rows would cost.

A LUT costs 16 * 2^b / K bits a weight, so models with short rows pay far more for their tables than
those people serve; `bare_costs` shows what the same allocations would cost there.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from pw.blocks import MODULES, ExpertGeometry
from pw.memory.budget import layouts_of
from pw.models.geometry import KvGeometry

Costs = NDArray[np.int64]  # [n, W]
LONG_ROW = 2048


def page_costs(
    geometry: ExpertGeometry,
    kv: KvGeometry,
    stored_bits: tuple[int, int],
    kv_dtype: torch.dtype = torch.float32,
    page_bytes: int | None = None,
    table_bytes: int | None = None,
) -> Costs:
    """Whole pages of planes and resident LUTs, padding included: the engine's own charge.

    Args:
        geometry: Of the experts.
        kv: Of the cache, whose tokens must fit a page.
        stored_bits: Narrowest and widest width.
        kv_dtype: Of the cache.
        page_bytes: None: as the engine chooses.
        table_bytes: Of tables that rows share, `Artifact.table_bytes`.
    """
    layouts = layouts_of(geometry, kv, kv_dtype, stored_bits, page_bytes, table_bytes)
    widths = range(stored_bits[0], stored_bits[1] + 1)
    rows = [[lay.resident_pages(b) * lay.page_bytes for b in widths] for lay in layouts]
    return np.tile(np.array(rows, dtype=np.int64), (geometry.blocks // len(MODULES), 1))


def bare_costs(geometry: ExpertGeometry, widths: range, row: int | None = None) -> Costs:
    """Planes and the LUT in use, without pages: what quantization papers count.

    Args:
        geometry: Of the experts.
        widths: Ascending.
        row: Charge LUTs as if rows had so many columns; None: as they are.
    """
    costs = []
    for module in MODULES:
        shape = geometry.shape(module)
        share = 1.0 if row is None else shape.cols / row
        costs.append([shape.weights * b // 8 + int(2 * shape.rows * 2**b * share) for b in widths])
    return np.tile(np.array(costs, dtype=np.int64), (geometry.blocks // len(MODULES), 1))


def total_bytes(costs: Costs, widths: range, bits: NDArray[np.int64]) -> int:
    """Bytes of an allocation [n]."""
    return int(costs[np.arange(len(bits)), bits - widths[0]].sum())


def mean_bits(geometry: ExpertGeometry, bits: NDArray[np.int64]) -> float:
    """Mean width over weights (not blocks) of an allocation [n]."""
    weights = np.tile(
        [geometry.shape(module).weights for module in MODULES], geometry.blocks // len(MODULES)
    )
    return float((weights * bits).sum() / weights.sum())
