"""The demo's picture: weights, KV cache and free pages over time, with the mean bits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from pw.evaluation.demo.timeline import QUIET, PlanKind, Timeline
from pw.evaluation.demo.view import BITS, FREE, KV, WEIGHTS

_INK, _FAINT = "#2b2f36", "#8a919c"
_PLAN_ROWS: tuple[tuple[PlanKind, str, str, str], ...] = (
    ("release", "planes given up", "v", KV),
    ("trade", "planes change hands", "D", _FAINT),
    ("reload", "planes come back", "^", WEIGHTS),
)


def plot_timeline(timeline: Timeline, title: str, path: Path) -> None:
    """Draw a timeline as PNG.

    Args:
        timeline: At least two samples.
        title: Above the picture.
        path: Replaced if it exists.
    """
    figure = Figure(figsize=(11, 6.6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.012, ha="left", color=_INK, fontsize=12.5, fontweight="bold")
    memory, plans, requests = figure.subplots(
        3, 1, sharex=True, gridspec_kw={"height_ratios": (6, 1.1, 1.5)}
    )
    seconds = [sample.seconds for sample in timeline.samples]
    _draw_memory(memory, timeline, seconds)
    _draw_plans(plans, timeline)
    _draw_requests(requests, timeline, seconds)
    for axes in (memory, plans, requests):
        _dress(axes)
        for start, _ in timeline.marks:
            axes.axvline(start, color=_INK, linewidth=0.8, linestyle=(0, (2, 3)), alpha=0.6)
    requests.set_xlim(seconds[0], seconds[-1])
    requests.set_xlabel("seconds", color=_INK)
    figure.savefig(path)


def _draw_memory(axes: Axes, timeline: Timeline, seconds: Sequence[float]) -> None:
    """Pages by owner, stacked, and the mean bits on an axis of their own."""
    mebi = timeline.first.page_bytes / 2**20
    total = timeline.first.pages_total * mebi
    stacks = [
        [getattr(sample, name) * mebi for sample in timeline.samples]
        for name in ("pages_weights", "pages_kv", "pages_free")
    ]
    axes.stackplot(
        seconds,
        *stacks,
        labels=("expert weights", "KV cache", "free"),
        colors=(WEIGHTS, KV, FREE),
        alpha=0.9,
        step="post",
        linewidth=0,
    )
    axes.set_ylim(0, total)
    axes.set_ylabel("pages of the arena, MiB", color=_INK)
    bits = axes.twinx()
    values = [sample.mean_bits for sample in timeline.samples]
    bits.step(seconds, values, where="post", color="white", linewidth=4.0, alpha=0.85)
    bits.step(seconds, values, where="post", color=BITS, linewidth=2.0, label="mean bits")
    bits.set_ylim(0, max(values) * 1.35)
    bits.set_ylabel("mean bits of an expert weight", color=BITS)
    bits.tick_params(axis="y", colors=BITS, length=0)
    bits.spines[:].set_visible(False)
    for start, name in timeline.marks:
        if name == QUIET:
            continue
        axes.annotate(
            name,
            (start, total),
            xytext=(3, 3),
            textcoords="offset points",
            color=_INK,
            fontsize=8.5,
        )
    handles, labels = axes.get_legend_handles_labels()
    more, names = bits.get_legend_handles_labels()
    bits.legend(
        handles + more, labels + names, loc="lower left", ncols=4, fontsize=9, framealpha=0.92
    )


def _draw_plans(axes: Axes, timeline: Timeline) -> None:
    """A mark for each plan, a row for each kind; its size follows the pages it moved."""
    kinds = {plan.kind for plan in timeline.plans}
    rows = [row for row in _PLAN_ROWS if row[0] in kinds]
    for height, (kind, _, marker, colour) in enumerate(rows):
        mine = [plan for plan in timeline.plans if plan.kind == kind]
        axes.scatter(
            [plan.seconds for plan in mine],
            [height] * len(mine),
            s=[10 + 0.4 * min(plan.pages, 150) for plan in mine],
            marker=marker,
            color=colour,
            alpha=0.75,
            linewidths=0,
        )
    axes.set_yticks(range(len(rows)), [row[1] for row in rows], fontsize=8.5)
    axes.set_ylim(-0.7, len(rows) - 0.3)


def _draw_requests(axes: Axes, timeline: Timeline, seconds: Sequence[float]) -> None:
    """Requests that run and wait, stacked."""
    axes.stackplot(
        seconds,
        [sample.running for sample in timeline.samples],
        [sample.waiting for sample in timeline.samples],
        labels=("running", "waiting"),
        colors=("#6c8ebf", "#c9cfd8"),
        step="post",
        linewidth=0,
    )
    axes.set_ylabel("requests", color=_INK)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.legend(loc="upper left", ncols=2, fontsize=8, framealpha=0.9)


def _dress(axes: Axes) -> None:
    """Quiet spines and ticks."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_FAINT)
    axes.tick_params(colors=_INK, length=0, labelsize=9)
