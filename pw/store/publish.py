"""The two decisions around a build: may it go on, and how it takes the place of what was there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pw.errors import StoreError
from pw.store.artifact import QUANTIZE
from pw.store.files import fsync_folder, remove_tree
from pw.store.manifest import MANIFEST, Manifest, plain
from pw.store.manifest_reader import load
from pw.store.tables import refuse_changes

BUILD = ".build"  # folder of what only a build needs


def make_folder(folder: Path) -> None:
    """Make the folder that will hold an artifact.

    Raises:
        StoreError: It cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot make folder `{folder}`: {error.strerror}") from error


def swap_in(partial: Path, path: Path) -> None:
    """Put a folder with a valid manifest in its final place; can be repeated after a kill."""
    load(partial / MANIFEST)
    remove_tree(partial / BUILD)
    fsync_folder(partial)
    old = path.with_name(f"{path.name}.old")
    remove_tree(old)
    if path.exists():
        os.rename(path, old)
    os.rename(partial, path)
    fsync_folder(path.parent)
    remove_tree(old)


def _identity(manifest: Manifest) -> dict[str, Any]:
    """What must be equal for two runs to give the same bytes."""
    return {
        "settings": dict(manifest.stages[QUANTIZE].settings),
        "model": {"files": dict(manifest.model.files), "architecture": manifest.model.architecture},
        "geometry": plain(manifest.geometry),
        "min_bits": manifest.min_bits,
        "max_bits": manifest.max_bits,
        "lut_dtype": manifest.lut_dtype,
    }


def refuse_other(folder: Path, found: Manifest, wanted: Manifest) -> None:
    """Refuse to go on with work that would end in other bytes.

    Raises:
        StaleStageError: Naming every setting that differs, with both values.
    """
    refuse_changes(folder, QUANTIZE, _identity(found), _identity(wanted))


def refuse_other_tool(folder: Path, found: Manifest, wanted: Manifest) -> None:
    """Refuse to mix blocks of two versions of this program in one artifact."""
    old, new = {"tool_version": found.tool_version}, {"tool_version": wanted.tool_version}
    refuse_changes(folder, QUANTIZE, old, new)
