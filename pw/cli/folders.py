"""Folders for results: refused before the work, not after it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from pw.errors import ConfigError


def check_folder(folder: Path, flag: str) -> None:
    """Make the folder that a flag names, if need be.

    Raises:
        ConfigError: It cannot be made or written, or is no folder.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{flag} is not a folder: `{folder}`", "name another one")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(
            f"cannot write {flag} `{folder}`: {error.strerror}", "name another folder"
        ) from error
