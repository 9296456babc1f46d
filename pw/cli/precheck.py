"""What is wrong with an artifact and can be told at once, before torch is loaded for the rest.

The engine checks all of it again, and more; this only spares people the wait.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from pw import FORMAT_VERSION
from pw.errors import StoreError

_MANIFEST_BYTES = 256 << 20
_FILE_BYTES = 64 << 20  # a tokenizer, a config; weights are left to the engine


def check_artifact(path: Path) -> None:
    """Refuse an artifact of a newer format, or whose configs and tokenizer are not its own.

    Raises:
        StoreError: Naming the file and what to do.
    """
    manifest = _read(path / "manifest.json")
    if manifest is None:
        return
    version = manifest.get("format_version")
    if type(version) is int and version > FORMAT_VERSION:
        raise StoreError(
            f"artifact has a newer format: `{path / 'manifest.json'}`: version {version}, "
            f"this program reads up to {FORMAT_VERSION}",
            "upgrade pagedweight",
        )
    files = manifest.get("files")
    for name, record in files.items() if isinstance(files, dict) else ():
        if "/" not in name and isinstance(record, dict) and _small(record):
            _check(path / name, str(record.get("sha256")))


def _read(path: Path) -> dict[str, Any] | None:
    """A manifest; None where only the engine can say what is wrong with it."""
    if not path.is_file() or path.stat().st_size > _MANIFEST_BYTES:
        return None
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _small(record: dict[str, Any]) -> bool:
    size = record.get("bytes")
    return isinstance(size, int) and size <= _FILE_BYTES


def _check(file: Path, sha256: str) -> None:
    if not file.is_file():
        raise StoreError(f"artifact file is missing: `{file}`", "copy the whole folder again")
    with file.open("rb") as stream:
        if hashlib.file_digest(stream, "sha256").hexdigest() != sha256:
            raise StoreError(
                f"artifact file is damaged: `{file}`: SHA-256 differs",
                "it is not the file that the artifact was made with: copy it again",
            )
