"""What `pw inspect` tells about an artifact, as plain JSON values. Reads no plane."""

from __future__ import annotations

from typing import Any

import numpy as np

from pw.blocks import MODULES
from pw.store.artifact import DENSE, Artifact
from pw.store.files import tree_sizes
from pw.store.manifest import plain
from pw.store.planes import LUTS, PLANES, PayloadLayout
from pw.store.tables import TABLES, group_name

COVERAGE = ("dead", "thin", "ok")  # meaning of the values 0, 1, 2 of `coverage` in `moments`


def describe(artifact: Artifact) -> dict[str, Any]:
    """Sizes, provenance, coverage and stages.

    Returns:
        `bytes` by class (sums to the size of the folder), `widths` with the bytes of all experts
        at each uniform width, LUTs included, and `weight_bits` = bits per expert weight there.
    """
    manifest = artifact.manifest
    return {
        "path": str(artifact.path),
        "artifact_hash": artifact.artifact_hash,
        "format_version": manifest.format_version,
        "tool_version": manifest.tool_version,
        "layout": manifest.layout,
        "lut_dtype": manifest.lut_dtype,
        "min_bits": manifest.min_bits,
        "max_bits": manifest.max_bits,
        "model": plain(manifest.model),
        "geometry": plain(manifest.geometry)
        | {"blocks": manifest.geometry.blocks, "weights": manifest.geometry.weights},
        "bytes": _bytes_by_class(artifact),
        "widths": _uniform_widths(artifact),
        "coverage": _coverage(artifact),
        "stages": plain(manifest.stages),
    }


def _bytes_by_class(artifact: Artifact) -> dict[str, int]:
    tables = {group_name(stage): "tables" for stage in TABLES}
    classes = {PLANES: "planes", LUTS: "luts", DENSE: "dense", **tables}
    total = dict.fromkeys(("planes", "luts", "dense", "tables", "other"), 0)
    for name, size in tree_sizes(artifact.path).items():
        total[classes.get(name.split("/")[0], "other")] += size
    return {**total, "total": sum(total.values())}


def _uniform_widths(artifact: Artifact) -> dict[str, dict[str, float]]:
    layout, geometry = PayloadLayout(artifact.manifest), artifact.geometry
    pairs = len(geometry.layers) * geometry.experts
    widths = {}
    for bits in layout.widths:
        planes = pairs * bits * sum(layout.plane_bytes[module] for module in MODULES)
        luts = pairs * sum(layout.lut_bytes[module, bits] for module in MODULES)
        widths[str(bits)] = {
            "planes": planes,
            "luts": luts,
            "total": planes + luts,
            "weight_bits": 8 * (planes + luts) / geometry.weights,
        }
    return widths


def _coverage(artifact: Artifact) -> dict[str, Any] | None:
    """How many experts calibration reached, in all and per layer; None before calibration."""
    if not artifact.has_table("moments"):
        return None
    coverage = artifact.table("moments").arrays.get("coverage")  # [L, E]
    if coverage is None or coverage.ndim != 2:
        return None
    counts = {name: np.sum(coverage == i, axis=1) for i, name in enumerate(COVERAGE)}
    return {
        name: {"experts": int(count.sum()), "per_layer": count.tolist()}
        for name, count in counts.items()
    }
