"""What an earlier run left: whether a build may go on from it, and how it becomes the artifact."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pw.errors import StaleStageError, StoreError
from pw.store.artifact import QUANTIZE
from pw.store.files import fsync_folder, read_bounded, remove_tree
from pw.store.manifest import MANIFEST, BlockSums, Manifest, plain
from pw.store.manifest_reader import load, sums_from_json
from pw.store.planes import PLANES, PayloadLayout
from pw.store.tables import refuse_changes

BUILD = ".build"  # folder of what only a build needs
DRAFT = "draft.json"  # the manifest so far, in that folder

_RECORD_LIMIT = 1 << 26  # bytes of a checksum record


def make_place(artifact: Path) -> None:
    """Make the folder in which an artifact will stand.

    Raises:
        StoreError: It cannot be made, or no artifact can stand there.
    """
    folder = artifact.parent
    if artifact.name in ("", ".."):
        raise StoreError(f"output has no name of its own: `{artifact}`", "name a folder: -o X.pw")
    for above in artifact.absolute().parents:
        if (above / MANIFEST).is_file() and (above / PLANES).is_dir():
            raise StoreError(
                f"output lies inside an artifact, which it would damage: `{artifact}`",
                "name another folder with -o",
            )
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


def anything_done(partial: Path, draft: Manifest) -> bool:
    """Whether a build has finished what took work: blocks or a table. Copied files do not count."""
    return len(draft.stages) > 1 or any((partial / BUILD / "blocks").glob("*.json"))


def resumable(partial: Path, wanted: Manifest, overwrite: bool) -> Manifest | None:
    """The draft of an earlier run that `wanted` may go on with; None to start afresh.

    Blocks of two versions of this program do not mix.

    Raises:
        StaleStageError: It has other settings and has done something, and `overwrite` is false.
        StoreError: It is damaged, and `overwrite` is false.
    """
    draft = partial / BUILD / DRAFT
    if not draft.exists():
        return None
    try:
        found = load(draft)
        old, new = {"tool_version": found.tool_version}, {"tool_version": wanted.tool_version}
        refuse_changes(partial, QUANTIZE, old | _identity(found), new | _identity(wanted))
    except StoreError as error:
        stale = isinstance(error, StaleStageError)
        if overwrite or (stale and not anything_done(partial, found)):
            return None
        error.hint = error.hint or "pass `--overwrite` to start again"
        raise
    return found


def read_record(path: Path, layout: PayloadLayout) -> BlockSums | None:
    """Checksums of a finished (layer, module); None, so that it is written again, if unreadable."""
    if not path.exists():
        return None
    try:
        value = json.loads(read_bounded(path, _RECORD_LIMIT))
        return sums_from_json(value, layout.geometry.experts, layout.widths, path)
    except (StoreError, ValueError, RecursionError):
        return None
