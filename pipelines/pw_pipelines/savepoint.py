"""Where a reading that takes long goes on after a stop: how far it was, and what was measured.

Knows files, not what is in them. Ranks that read together save together: a stop may leave one of
them a step ahead, which then goes back to the step before.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from pw.store.files import fsync_file, remove_tree
from pw_pipelines.progress import Progress
from pw_pipelines.ranks import ALONE, Ranks

_SUMS = "sums.safetensors"
_BEFORE = "before.safetensors"  # the sums of the step before
_IDENTITY = "identity"


class Savepoint:
    """A folder beside an artifact, `X.pw.work/<stage>`; gone when the stage is done.

    Args:
        artifact: Folder of the artifact, present or future.
        stage: Name of the stage.
        inputs: Everything that decides the result; what was saved with others is thrown away.
        ranks: Who reads; each has a folder of its own.
    """

    def __init__(
        self, artifact: Path, stage: str, inputs: Mapping[str, Any], ranks: Ranks = ALONE
    ) -> None:
        name = stage if ranks.size == 1 else f"{stage}.{ranks.rank}-of-{ranks.size}"
        self._folder, self._ranks = artifact.with_name(f"{artifact.name}.work") / name, ranks
        text = json.dumps([name, dict(inputs), torch.__version__], sort_keys=True)
        self._identity = hashlib.sha256(text.encode()).hexdigest()
        self.states = self._folder / "states"  # file for hidden states
        self.opened = False  # whether a reading saves here

    def useful(self, needed: bool) -> bool:
        """Whether to save at all: only if every rank needs it."""
        return bool(self._ranks.least(int(needed)))

    def done(self) -> int:
        """Steps done by an earlier run with these inputs, by all ranks; changes nothing."""
        identity = self._folder / _IDENTITY
        own = identity.is_file() and identity.read_text() == self._identity
        return self._ranks.least(max(self._done(_SUMS), self._done(_BEFORE)) if own else 0)

    def tell(self, command: str, steps: int, progress: Progress) -> None:
        """Say where the reading of a command goes on, if it does; it has so many steps in all."""
        if done := self.done():
            progress.note(
                f"{command}: goes on from `{self._folder}`: {done} of {steps} passes of layers "
                f"are done"
            )

    def open(self) -> tuple[int, dict[str, Tensor]]:
        """Steps done by an earlier run with these inputs, and what it had measured; 0 if none.

        With several ranks, the steps that all of them have done.
        """
        self.opened = True
        identity = self._folder / _IDENTITY
        if not identity.is_file() or identity.read_text() != self._identity:
            remove_tree(self._folder)
            self._folder.mkdir(parents=True)
            identity.write_text(self._identity)
        saved = {done: name for name in (_BEFORE, _SUMS) if (done := self._done(name))}
        done = self._ranks.least(max(saved, default=0))
        if done not in saved:
            return 0, {}
        with safe_open(self._folder / saved[done], "pt") as tensors:
            return done, {name: tensors.get_tensor(name) for name in tensors.keys()}

    def save(self, done: int, tensors: Mapping[str, Tensor]) -> None:
        """Record that `done` steps are finished, hidden states on disk included."""
        fsync_file(self.states)
        scratch = self._folder / f"{_SUMS}.new"
        save_file(dict(tensors), scratch, metadata={"done": str(done)})
        fsync_file(scratch)
        if self._done(_SUMS):
            os.replace(self._folder / _SUMS, self._folder / _BEFORE)
        os.replace(scratch, self._folder / _SUMS)
        self._ranks.wait()  # nobody overwrites what another may have to read again

    def clear(self) -> None:
        """Forget all."""
        remove_tree(self._folder)
        with suppress(OSError):  # another rank's folder is still there, or there was none
            self._folder.parent.rmdir()

    def _done(self, name: str) -> int:
        """Steps that a file of sums stands for; 0 if there is none."""
        if not (self._folder / name).is_file():
            return 0
        with safe_open(self._folder / name, "pt") as saved:
            return int(saved.metadata()["done"])
