"""Scores that have been measured are not measured again: one JSON line per allocation and text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pw.evaluation.lab.lab import Lab, Scores
from pw.evaluation.lab.model import Bits


class CachedLab:
    """A lab that remembers on disk.

    Args:
        lab: Measures what is not known.
        folder: Where to remember; one file per artifact and set of windows. None: nowhere.

    Attributes:
        model: The lab's.
    """

    def __init__(self, lab: Lab, folder: Path | None) -> None:
        self.lab, self.model = lab, lab.model
        self._known: dict[str, Scores] = {}
        self._file = None if folder is None else folder / f"scores-{_identity(lab)}.jsonl"
        if self._file is not None and self._file.exists():
            for line in self._file.read_text("utf-8").splitlines():
                row = json.loads(line)
                self._known[row["bits"]] = Scores(np.array(row["nll"]), np.array(row["kl"]))

    @property
    def dense(self) -> Scores:
        """The unquantized model."""
        return self.score(self.model.unquantized())

    def score(self, bits: Bits | Sequence[Bits]) -> Scores:
        """See `Lab.score`."""
        table = np.asarray(bits, dtype=np.int64)
        if table.ndim == 2 and (table == table[0]).all():
            table = table[0]
        name = hashlib.sha256(f"{table.shape}".encode() + table.astype("<i8").tobytes()).hexdigest()
        if name not in self._known:
            self._remember(name, self.lab.score(table))
        return self._known[name]

    def _remember(self, name: str, scores: Scores) -> None:
        self._known[name] = scores
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            row = {"bits": name, "nll": scores.nll.tolist(), "kl": scores.kl.tolist()}
            with self._file.open("ab", buffering=0) as stream:
                stream.write(f"{json.dumps(row)}\n".encode())  # at once: studies run side by side


def _identity(lab: Lab) -> str:
    """Of the artifact's weights and the windows; 16 hex digits.

    Tables that stages add later do not count: they change no weight.
    """
    digest = hashlib.sha256(lab.model.artifact.manifest.stage_digest("quantize").encode())
    for window in lab.windows:
        digest.update(f"{window.scored},{len(window.ids)};".encode())
        digest.update(window.ids.numpy().astype("<i8").tobytes())
    return digest.hexdigest()[:16]
