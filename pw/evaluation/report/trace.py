"""A server's precision trace as a timeline: weights, KV and mean bits over its steps."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pw.blocks import MODULES, BlockKey
from pw.errors import ConfigError
from pw.memory.layout import BlockLayout, choose_base_bits
from pw.store.artifact import Artifact

_FORMAT = "pw-trace-1"


@dataclass
class TraceTimeline:
    """States after those steps at which something moved. Sizes in bytes."""

    steps: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    kv: list[float] = field(default_factory=list)
    free: list[float] = field(default_factory=list)
    bits: list[float] = field(default_factory=list)


def read_timeline(path: Path, artifact: Artifact) -> TraceTimeline:
    """Follow a trace.

    Widths come from the transitions; free pages from the plans, which say how many there were.
    What is neither free nor held by planes and LUTs is KV.

    Raises:
        ConfigError: The file is no trace, of another artifact, or nothing moved in it.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
        records = [json.loads(line) for line in lines]
        start = next(record for record in records if record["event"] == "start")
        if start["format"] != _FORMAT:
            raise ValueError(start["format"])
        if start["artifact"] != artifact.artifact_hash:
            raise ConfigError(
                f"the trace was recorded with another artifact: `{path}`: "
                f"{start['artifact'][:12]}, this one is {artifact.artifact_hash[:12]}"
            )
        return _follow(records, start, artifact)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"cannot read the trace: `{path}`: {reason}") from error
    except (ValueError, KeyError, TypeError, IndexError, StopIteration) as error:
        raise ConfigError(f"not a precision trace: `{path}`") from error


class _Arena:
    """Widths and pages of the blocks of a trace."""

    def __init__(self, start: dict[str, Any], artifact: Artifact) -> None:
        geometry, stored = artifact.geometry, (artifact.min_bits, artifact.max_bits)
        shapes = [geometry.shape(module) for module in MODULES]
        tables = artifact.table_bytes
        base = choose_base_bits(shapes, *stored, tables)
        page = int(start["page_bytes"])
        self._geometry, self._page, self._pages = geometry, page, int(start["pages"])
        self._layouts = [BlockLayout(shape, *stored, base, page, tables) for shape in shapes]
        self._bits = [int(width) for width in start["bits"]]
        if len(self._bits) != geometry.blocks:
            raise ValueError(f"{len(self._bits)} widths")
        self._weights = np.array([geometry.shape(module).weights for module in MODULES])
        self._moving: dict[int, int] = {}  # block -> pages taken for a wider width

    def take(self, record: dict[str, Any]) -> None:
        """Apply one transition."""
        key = BlockKey(int(record["layer"]), int(record["expert"]), record["module"])
        block = self._geometry.index(key)
        if record["event"] == "begin_raise":
            self._moving[block] = int(record["pages"])
            return
        self._moving.pop(block, None)
        if record["event"] in ("reduce", "commit_raise"):
            self._bits[block] = int(record["to"])

    def note(self, into: TraceTimeline, step: int, free_pages: int) -> None:
        """Append the state at a step."""
        held = sum(self._moving.values()) + sum(
            self._layouts[block % len(MODULES)].resident_pages(bits)
            for block, bits in enumerate(self._bits)
        )
        bits = np.array(self._bits).reshape(-1, len(MODULES)).mean(0)
        into.steps.append(step)
        into.weights.append(held * self._page)
        into.kv.append(max(self._pages - held - free_pages, 0) * self._page)
        into.free.append(free_pages * self._page)
        into.bits.append(float((bits * self._weights).sum() / self._weights.sum()))


def _follow(
    records: list[dict[str, Any]], start: dict[str, Any], artifact: Artifact
) -> TraceTimeline:
    arena, found = _Arena(start, artifact), TraceTimeline()
    for record in records:
        if record["event"] in ("reduce", "begin_raise", "commit_raise", "cancel_raise"):
            arena.take(record)
        elif record["event"] == "plan":
            arena.note(found, int(record["step"]), int(record["pages_free"]))
    if not found.steps:
        raise ConfigError("nothing moved in the trace: it has no plan", "trace a run under load")
    return found
