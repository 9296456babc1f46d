"""Leaves a report in a folder: data, markdown, pictures, and one page that needs nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pw.evaluation.report.html import page
from pw.evaluation.report.markdown import markdown
from pw.evaluation.report.pictures import draw, drawn_trace
from pw.evaluation.sweep import Sweep
from pw.store.files import replace_file
from pw.store.manifest import plain


def write_report(
    folder: Path, described: Mapping[str, Any], trace: Path | None, artifact: Path
) -> list[Path]:
    """Write report.json, report.md, report.html and a .png for each picture.

    Args:
        folder: Made if missing; files of the same names are replaced.
        described: See `pw.evaluation.report.document`.
        trace: A precision trace to draw.
        artifact: With which the trace was recorded.

    Raises:
        ConfigError: The trace cannot be read.
    """
    pictures = draw(described)
    if trace is not None:
        pictures.append(drawn_trace(trace, artifact))
    folder.mkdir(parents=True, exist_ok=True)
    files = {f"{picture.name}.png": picture.png() for picture in pictures}
    captions = [(picture.caption, f"{picture.name}.png") for picture in pictures]
    files["report.json"] = (json.dumps(plain(described), indent=1) + "\n").encode()
    files["report.md"] = markdown(described, captions).encode()
    files["report.html"] = page(described, pictures).encode()
    for name, data in files.items():
        replace_file(folder / name, data)
    return [folder / name for name in files]


def write_samples(folder: Path, sweep: Sweep) -> list[Path]:
    """Write samples-<task>.jsonl: every prompt with what each policy made of it."""
    lines: dict[str, list[str]] = {}
    for row in sweep.rows:
        about = {"policy": row.policy, "budget": None if row.budget is None else row.budget.name}
        found = [(result.task, result.samples) for result in row.tasks]
        found += [(result.task, result.samples) for result in row.harness]
        for task, samples in found:
            each = (json.dumps(about | sample, default=str) for sample in samples)
            lines.setdefault(task, []).extend(each)
    written = []
    for task, rows in lines.items():
        path = folder / f"samples-{re.sub(r'[^A-Za-z0-9._-]', '_', task)}.jsonl"
        replace_file(path, ("\n".join(rows) + "\n").encode())
        written.append(path)
    return written
