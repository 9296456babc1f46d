"""Which pictures a report has, each as a file and as part of a page."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from pw.evaluation.report import plots
from pw.evaluation.report.document import MODULES, scored, varied
from pw.evaluation.report.trace import read_timeline
from pw.store.artifact import Artifact

_MOST_MAPS = 6  # rows whose widths are drawn


@dataclass(frozen=True)
class Picture:
    """One figure of the report."""

    name: str  # of the file, without its ending
    caption: str
    figure: Figure

    def png(self) -> bytes:
        """As a file of its own."""
        data = io.BytesIO()
        self.figure.savefig(data, format="png", dpi=120)
        return data.getvalue()

    def svg(self) -> str:
        """As part of a page; its ids do not collide with those of other pictures."""
        data = io.StringIO()
        with rc_context({"svg.hashsalt": self.name, "svg.fonttype": "none"}):
            self.figure.savefig(data, format="svg", metadata={"Date": None}, transparent=True)
        text = data.getvalue()
        text = text[text.index("<svg") :]
        text = re.sub(r'\bid="', f'id="{self.name}-', text)
        text = re.sub(r'href="#', f'href="#{self.name}-', text)
        return text.replace("url(#", f"url(#{self.name}-")


def draw(described: Mapping[str, Any]) -> list[Picture]:
    """All pictures that the figures allow."""
    pictures = []
    for measure, label in (
        ("kl", "divergence from dense, nats a token"),
        ("nll", f"loss over {described['reference']}, nats a token"),
    ):
        points = plots.frontier_points(described, measure)
        if len(points) > 1:
            caption = f"Quality over memory: {label}, with 95 % intervals"
            figure = plots.frontier(points, "routed experts: planes and LUTs, MiB", label)
            pictures.append(Picture(f"frontier-{measure}", caption, figure))
    return [*pictures, *_maps(described), *_timelines(described)]


def drawn_trace(trace: Path, artifact: Path) -> Picture:
    """A server's precision trace over its steps.

    Raises:
        ConfigError: It cannot be read, or belongs to another artifact.
    """
    found = read_timeline(trace, Artifact.open(artifact))
    figure = plots.timeline(found.steps, found.weights, found.kv, found.free, found.bits)
    return Picture("trace", f"Precision and KV over time, from {trace.name}", figure)


def _maps(described: Mapping[str, Any]) -> list[Picture]:
    rows = [row for row in scored(described) if varied(row)][:_MOST_MAPS]
    widths = [
        bits
        for row in rows
        for layer in row["widths"]["blocks"]
        for module in MODULES
        for bits in layer[module]
    ]
    return [
        Picture(
            f"bits-{place}",
            f"Mean bits of every expert while the text was scored: {_name(row)}",
            plots.heat_map(row["widths"]["blocks"], (min(widths), max(widths))),
        )
        for place, row in enumerate(rows, 1)
    ]


def _timelines(described: Mapping[str, Any]) -> list[Picture]:
    """Of rows whose widths moved."""
    pictures: list[Picture] = []
    for row in scored(described):
        moments = row["timeline"]
        if len({moment["weight_bytes"] for moment in moments}) < 2:
            continue
        steps, weights, kv, free, bits = (
            [moment[name] for moment in moments]
            for name in ("step", "weight_bytes", "kv_bytes", "free_bytes", "mean_bits")
        )
        figure = plots.timeline(steps, weights, kv, free, bits)
        name = f"timeline-{len(pictures) + 1}"
        pictures.append(Picture(name, f"Precision and KV over time: {_name(row)}", figure))
    return pictures


def _name(row: Mapping[str, Any]) -> str:
    return row["policy"] if row["budget"] is None else f"{row['policy']} in {row['budget']}"
