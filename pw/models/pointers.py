"""Files that git-lfs left in the place of others. Loads neither torch nor transformers."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from pw.errors import ModelError

_POINTER = b"version https://git-lfs.github.com/spec/"


def refuse_pointer(file: Path) -> None:
    """Refuse a file that stands for another one; all else is left to its reader.

    Raises:
        ModelError: It is a git-lfs pointer.
    """
    if not file.is_file():
        return
    with file.open("rb") as stream:
        if stream.read(len(_POINTER)) == _POINTER:
            raise ModelError(
                f"not the file itself but a git-lfs pointer to it: `{file}`",
                f"fetch what it stands for: `git -C {quote(str(file.parent))} lfs pull`",
            )
