"""The tokenizer for a process that runs no model: transformers without torch behind it.

transformers imports torch whenever it finds it: seconds of start and two thirds of the memory of
a process that only tokenizes. Its tokenizers and chat templates need none of it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pw.models.tokenizer import Tokenizer


def load_tokenizer_alone(path: Path) -> Tokenizer:
    """The tokenizer in a checkpoint or artifact folder; see `load_tokenizer`.

    transformers is of no use for models in this process afterwards, unless it was there before.

    Raises:
        ModelError: There is none, or it cannot be read.
    """
    with _torch_hidden():
        from pw.models.tokenizer import load_tokenizer

        return load_tokenizer(path)


@contextmanager
def _torch_hidden() -> Iterator[None]:
    """Let nobody find torch, if nobody has it yet."""
    if "torch" in sys.modules or "transformers" in sys.modules:
        yield
        return
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # such as to install torch
    sys.modules["torch"] = None  # type: ignore[assignment]  # an import fails, as without it
    try:
        yield
    finally:
        del sys.modules["torch"]
