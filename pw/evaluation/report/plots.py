"""Pictures of an evaluation. Each function gives a figure; `write` decides what becomes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from numpy.typing import NDArray

from pw.evaluation.report.document import MODULES, scored

INK, FAINT, GRID = "#2b2f36", "#8a919c", "#e6e9ee"
WEIGHTS, KV, FREE, BITS = "#4269d0", "#ff8a3d", "#d5d9e0", "#2a8a4a"  # as in the demo
_COLOURS = ("#2a8a4a", "#c2410c", "#7c3aed", "#0e7490", "#be185d")
_MEBI = 2**20


@dataclass(frozen=True)
class Point:
    """One policy at one budget, in a picture of quality over memory."""

    label: str
    series: str  # points of one series are joined by a line
    size: float  # MiB
    mean: float  # nats a token
    low: float
    high: float


def frontier(points: Sequence[Point], size_label: str, loss_label: str) -> Figure:
    """Quality over memory, one line for each series; the loss axis is logarithmic.

    Where an interval reaches zero or below its bar goes to the bottom of the picture. Losses are
    positive.
    """
    figure = Figure(figsize=(8.0, 4.6), layout="constrained")
    axes = figure.subplots()
    bottom = min(point.mean for point in points) / 3
    for place, series in enumerate(dict.fromkeys(point.series for point in points)):
        mine = sorted((p for p in points if p.series == series), key=lambda p: p.size)
        colour = FAINT if place == 0 else _COLOURS[(place - 1) % len(_COLOURS)]
        below = [p.mean - max(p.low, bottom * 0.5) for p in mine]
        axes.errorbar(
            [p.size for p in mine],
            [p.mean for p in mine],
            yerr=[below, [p.high - p.mean for p in mine]],
            color=colour,
            marker="o" if place == 0 else "D",
            markersize=5.5,
            linewidth=1.4,
            elinewidth=1.0,
            capsize=3,
            label=series,
            zorder=2 + place,
        )
        for p in mine:
            axes.annotate(
                p.label,
                (p.size, p.mean),
                xytext=(6, 5) if place == 0 else (-6, -11),
                textcoords="offset points",
                ha="left" if place == 0 else "right",
                fontsize=8,
                color=INK if place == 0 else colour,
            )
    axes.set_yscale("log")
    axes.set_ylim(bottom=bottom)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel(size_label, color=INK)
    axes.set_ylabel(loss_label, color=INK)
    axes.margins(x=0.08)
    axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    _dress(axes, grid=True)
    return figure


def frontier_points(described: Mapping[str, Any], measure: str) -> list[Point]:
    """Points of all rows: `measure` is `kl` or `nll` (over the reference).

    A row without a loss has none: it has no place on a logarithmic axis.

    Policies of one width are the first series; every kind of other policy is one of its own.
    """
    points = []
    for row in scored(described):
        value = row["kl"] if measure == "kl" else (row["against_reference"] or {}).get("nll")
        if value is None or value["mean"] <= 0:
            continue
        kind, _, argument = row["policy"].partition(":")
        uniform = kind == "static" and argument.isdigit()
        label = f"{argument} bits" if uniform else row["budget"] or Path(row["policy"]).name
        series = "one width for all" if uniform else kind if row["budget"] else "fixed widths"
        size = row["bytes"]["experts"] / _MEBI
        points.append(Point(label, series, size, value["mean"], value["low"], value["high"]))
    return sorted(points, key=lambda point: point.series != "one width for all")


def heat_map(layers: Sequence[Mapping[str, Any]], bounds: tuple[float, float]) -> Figure:
    """Mean bits of every block: a row for each layer, a column for each expert.

    Args:
        layers: {"layer", "gate_up": [E], "down": [E]}.
        bounds: Fewest and most bits of the colour scale.
    """
    names = [str(layer["layer"]) for layer in layers]
    count = len(layers[0]["gate_up"])
    height = 1.6 + 0.26 * len(layers)
    figure = Figure(figsize=(10.0, min(height, 12.0)), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, module in zip(panels, MODULES, strict=True):
        bits = np.array([layer[module] for layer in layers], dtype=np.float64)
        picture = axes.imshow(bits, cmap="viridis", vmin=bounds[0], vmax=bounds[1], aspect="auto")
        if bits.size <= 160:
            _write_numbers(axes, bits, bounds)
        axes.set_title(module, color=INK, fontsize=10)
        axes.set_xlabel("expert", color=INK)
        axes.set_yticks(range(len(names)), names)
        axes.set_xticks(np.arange(0, count, max(1, count // 16)))
        axes.spines[:].set_visible(False)
        axes.tick_params(colors=INK, length=0, labelsize=8)
    panels[0].set_ylabel("layer", color=INK)
    bar = figure.colorbar(picture, ax=list(panels), pad=0.01)
    bar.set_label("bits", color=INK)
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=INK, length=0, labelsize=8)
    return figure


def _write_numbers(axes: Axes, bits: NDArray[np.float64], bounds: tuple[float, float]) -> None:
    middle = (bounds[0] + bounds[1]) / 2
    for (row, column), width in np.ndenumerate(bits):
        axes.text(
            column,
            row,
            f"{width:g}" if width == round(width) else f"{width:.1f}",
            ha="center",
            va="center",
            fontsize=7,
            color="white" if width < middle else INK,
        )


def timeline(
    steps: Sequence[float],
    weights: Sequence[float],
    kv: Sequence[float],
    free: Sequence[float],
    bits: Sequence[float],
    unit: str = "forward step",
) -> Figure:
    """Weights, KV and free pages of the arena over time, and the mean bits.

    Args:
        steps: When; the state lasts until the next one.
        weights: Bytes of planes and LUTs.
        kv: Bytes of KV pages.
        free: Bytes of free pages.
        bits: Mean bits of an expert weight.
        unit: Of `steps`.
    """
    figure = Figure(figsize=(10.0, 3.6), layout="constrained")
    axes = figure.subplots()
    stacks = [[size / _MEBI for size in sizes] for sizes in (weights, kv, free)]
    axes.stackplot(
        steps,
        *stacks,
        labels=("expert weights", "KV cache", "free"),
        colors=(WEIGHTS, KV, FREE),
        alpha=0.9,
        step="post",
        linewidth=0,
    )
    axes.set_xlim(steps[0], max(steps[-1], steps[0] + 1))
    axes.set_ylim(0, max(map(sum, zip(*stacks, strict=True))) or 1)
    axes.set_xlabel(unit, color=INK)
    axes.set_ylabel("pages of the arena, MiB", color=INK)
    width = axes.twinx()
    width.step(steps, bits, where="post", color="white", linewidth=4.0, alpha=0.85)
    width.step(steps, bits, where="post", color=BITS, linewidth=2.0, label="mean bits")
    width.set_ylim(0, max(bits) * 1.35)
    width.set_ylabel("mean bits", color=BITS)
    width.tick_params(axis="y", colors=BITS, length=0)
    width.spines[:].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    more, names = width.get_legend_handles_labels()
    width.legend(
        handles + more, labels + names, loc="lower left", ncols=4, fontsize=8.5, framealpha=0.92
    )
    _dress(axes)
    return figure


def _dress(axes: Axes, *, grid: bool = False) -> None:
    """Quiet spines, ticks and grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, length=0, labelsize=9, which="both")
    if grid:
        axes.grid(True, which="major", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
