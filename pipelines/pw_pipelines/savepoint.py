"""Where a reading that takes long goes on after a stop: how far it was, and what was measured.

Knows files, not what is in them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from pw.store.files import fsync_file, remove_tree

_SUMS = "sums.safetensors"
_IDENTITY = "identity"


class Savepoint:
    """A folder beside an artifact, `X.pw.work/<stage>`; gone when the stage is done.

    Args:
        artifact: Folder of the artifact, present or future.
        stage: Name of the stage.
        inputs: Everything that decides the result; what was saved with others is thrown away.
    """

    def __init__(self, artifact: Path, stage: str, inputs: Mapping[str, Any]) -> None:
        self._folder = artifact.with_name(f"{artifact.name}.work") / stage
        text = json.dumps([stage, dict(inputs), torch.__version__], sort_keys=True)
        self._identity = hashlib.sha256(text.encode()).hexdigest()
        self.states = self._folder / "states"  # file for hidden states

    def open(self) -> tuple[int, dict[str, Tensor]]:
        """Steps done by an earlier run with these inputs, and what it had measured; 0 if none."""
        identity = self._folder / _IDENTITY
        if not identity.is_file() or identity.read_text() != self._identity:
            remove_tree(self._folder)
            self._folder.mkdir(parents=True)
            identity.write_text(self._identity)
        if not (self._folder / _SUMS).is_file():
            return 0, {}
        with safe_open(self._folder / _SUMS, "pt") as saved:
            tensors = {name: saved.get_tensor(name) for name in saved.keys()}
            return int(saved.metadata()["done"]), tensors

    def save(self, done: int, tensors: Mapping[str, Tensor]) -> None:
        """Record that `done` steps are finished, hidden states on disk included."""
        fsync_file(self.states)
        scratch = self._folder / f"{_SUMS}.new"
        save_file(dict(tensors), scratch, metadata={"done": str(done)})
        fsync_file(scratch)
        os.replace(scratch, self._folder / _SUMS)

    def clear(self) -> None:
        """Forget all."""
        remove_tree(self._folder)
        if self._folder.parent.is_dir() and not any(self._folder.parent.iterdir()):
            self._folder.parent.rmdir()
