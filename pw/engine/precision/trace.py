"""The precision trace: every change of bits with its step and reason, and its replay.

One JSON object a line:

    {"event": "start", "format": "pw-trace-1", "artifact": sha256, "policy": ..., "budget": bytes,
     "pages": P, "page_bytes": ..., "bits": [...]}
    {"event": "request", "step": s, "id": ..., "prompt": [...], "params": {...}}    if asked for
    {"event": "abort", "step": s, "id": ...}                                        with them
    {"event": "reduce", "step": s, "layer": l, "expert": e, "module": m, "from": b, "to": b',
     "pages": freed, "damage": d, "reason": ...}
    {"event": "begin_raise", ... "pages": taken}   {"event": "commit_raise", ...}
    {"event": "cancel_raise", ...}
    {"event": "failed", ... "from": b, "to": b', "reason": error}    nothing changed, not replayed
    {"event": "plan", "step": s, "reason": ..., "moves": n, ...}    a summary, not replayed: moves
                          that were made or begun, or are still to begin and may yet be refused

Reasons are the pressure policy's, `kv allocation` and `last resort` of the scheduler, `rebalance`,
`policy`, and `floor`: a request waits for its `min_bits`.

Bits of `start` are in block index order. `step` is the number of the forward step that is the
first to see the change, so that a replay that applies the same events before the same steps runs
the same arithmetic.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from pw.blocks import BlockKey, Module
from pw.errors import ConfigError

logger = logging.getLogger(__name__)

FORMAT = "pw-trace-1"
_TRANSITIONS = ("reduce", "begin_raise", "commit_raise", "cancel_raise")


class TraceWriter:
    """Appends events to a file, or nowhere when there is none.

    A disk that fails ends the trace, not the service.
    """

    def __init__(self, path: Path | None) -> None:
        self._file: TextIO | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("w", encoding="utf-8")

    def write(self, event: str, **fields: Any) -> None:
        """Write one event; complete lines only, at once."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps({"event": event, **fields}) + "\n")
            self._file.flush()
        except OSError as error:
            logger.error("the trace ends here, it cannot be written: %s", error)
            self.close()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # what was not flushed has been reported
                self._file.close()
            self._file = None


@dataclass(frozen=True)
class Transition:
    """A change of one block, read from a trace."""

    event: str  # reduce | begin_raise | commit_raise | cancel_raise
    key: BlockKey
    to_bits: int
    reason: str


@dataclass(frozen=True)
class Replay:
    """A trace to be repeated."""

    artifact: str
    pages: int  # of the arena
    page_bytes: int
    bits: list[int]  # at the start, in block index order
    transitions: dict[int, list[Transition]]  # by step


def read_replay(path: Path) -> Replay:
    """Read the transitions of a trace.

    Raises:
        ConfigError: The file is missing or no trace of this format.
    """
    transitions: dict[int, list[Transition]] = defaultdict(list)
    start: dict[str, Any] | None = None
    try:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                record = json.loads(line)
                if record["event"] == "start":
                    start = record
                elif record["event"] in _TRANSITIONS:
                    transitions[int(record["step"])].append(_transition(record))
    except OSError as error:
        raise ConfigError(f"cannot read the trace `{path}`: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"not a precision trace: `{path}`") from error
    if start is None or start.get("format") != FORMAT:
        raise ConfigError(f"not a trace of format {FORMAT}: `{path}`")
    try:
        bits = [int(width) for width in start["bits"]]
        pages, page_bytes = int(start["pages"]), int(start["page_bytes"])
        return Replay(str(start["artifact"]), pages, page_bytes, bits, dict(transitions))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"not a precision trace: `{path}`") from error


def _transition(record: dict[str, Any]) -> Transition:
    module: Module = "gate_up" if record["module"] == "gate_up" else "down"
    key = BlockKey(int(record["layer"]), int(record["expert"]), module)
    return Transition(record["event"], key, int(record["to"]), str(record["reason"]))
