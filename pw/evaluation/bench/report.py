"""Results of a benchmark as a table for people, CSV for spreadsheets or JSON for programs."""

from __future__ import annotations

import csv
import io
import json
import platform
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pw import __version__
from pw.config import format_bytes
from pw.errors import ConfigError
from pw.store.manifest import plain

FORMS = ("md", "csv", "json")
_SECRET = "--api-key"
_LISTS = ("latencies",)  # raw values: in JSON alone


def render(rows: Iterable[dict[str, Any]], form: str) -> str:
    """Rows of figures; those of a nested mapping get a dotted name.

    Raises:
        ConfigError: The form is none of FORMS.
    """
    rows = list(rows)
    if form == "json":
        return json.dumps(plain(rows[0] if len(rows) == 1 else rows), indent=2, allow_nan=False)
    if form not in FORMS:
        raise ConfigError(f"unknown output form: `{form}`", f"use {', '.join(FORMS)}")
    flat = [dict(_flat(plain(row))) for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    if form == "csv":
        text = io.StringIO()
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(flat)
        return text.getvalue().rstrip("\n")
    heads = ["measured", *(f"run {i + 1}" if len(flat) > 1 else "value" for i in range(len(flat)))]
    lines = [heads, ["---", *("---:" for _ in flat)]]
    lines += [[name, *(_cell(name, row.get(name)) for row in flat)] for name in names]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _flat(row: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            if name not in _LISTS and value:
                yield f"{prefix}{name}", " ".join(map(str, value))
        else:
            yield f"{prefix}{name}", value


def _cell(name: str, value: Any) -> str:
    if name.startswith(("bytes", "budget")) and isinstance(value, int):
        return format_bytes(value)
    if isinstance(value, float):
        return f"{value:,.3f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "" if value is None else str(value)


def save(result: dict[str, Any], kind: str, folder: Path, name: str | None) -> Path:
    """Write a result with when, where and by which command it was measured; the file.

    Args:
        result: Figures and settings.
        kind: Which benchmark.
        folder: Made if it is not there.
        name: Of the file; None = kind and time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    now = time.strftime("%Y%m%d-%H%M%S")
    path = folder / (name or f"pw-{kind}-{now}.json")
    record = {"benchmark": kind, "date": now, "version": __version__, "machine": machine()}
    record["command"] = _command(sys.argv[1:])
    path.write_text(json.dumps(record | plain(result), indent=2) + "\n", "utf-8")
    return path


def _command(words: Sequence[str]) -> str:
    """What was typed behind `pw`, but for keys."""
    found = ["pw"]
    for word in words:
        name, is_assigned, _ = word.partition("=")
        secret = found[-1] == _SECRET or (name == _SECRET and is_assigned)
        found.append(f"{name}=..." if secret and is_assigned else "..." if secret else word)
    return shlex.join(found)


def machine() -> dict[str, Any]:
    """What it ran on."""
    import torch

    cuda = torch.cuda.is_available()
    return {
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "torch": torch.__version__,
    }
