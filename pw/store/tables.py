"""Tables of measurements: one zarr group per stage, complete or absent, refused when stale.

Owns the four groups beside the planes. Knows nothing of what the numbers mean.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from pw.errors import StaleStageError, StoreError
from pw.store.files import (
    disk_errors,
    fsync_folder,
    fsync_tree,
    regular_size,
    remove_tree,
    sha256_file,
)
from pw.store.manifest import FileRecord, Manifest, StageRecord, differences, plain

TABLES = ("moments", "sensitivity", "routing", "residuals")

_DTYPES = "biuf"  # numpy kinds a table may hold: bool, int, unsigned, float
_ARRAY_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_METADATA_LIMIT = 1 << 20  # bytes of one zarr.json


@dataclass(frozen=True)
class Table:
    """Arrays and attributes of one stage, in memory."""

    arrays: dict[str, NDArray[Any]]
    attrs: dict[str, Any] = field(default_factory=dict)


def group_name(stage: str) -> str:
    """Folder of a stage's table."""
    if stage not in TABLES:
        raise ValueError(f"unknown table: {stage!r}, expected one of {', '.join(TABLES)}")
    return f"{stage}.zarr"


def file_records(root: Path, folder: Path) -> dict[str, FileRecord]:
    """Size and digest of every file below `folder`, named relative to `root`."""
    records = {}
    for path in sorted(folder.rglob("*")):
        if not path.is_dir():
            name = path.relative_to(root).as_posix()
            records[name] = FileRecord(path.stat().st_size, sha256_file(path))
    return records


class TableFolder:
    """The tables of one artifact folder and the manifest that vouches for them.

    Args:
        root: Folder of the artifact, finished or being built.
        manifest: What the folder holds now.
        save: Makes a new manifest durable, atomically.
    """

    def __init__(self, root: Path, manifest: Manifest, save: Callable[[Manifest], None]) -> None:
        self.root = root
        self.manifest = manifest
        self._save = save

    def has(self, stage: str) -> bool:
        """Whether the stage has been recorded."""
        group_name(stage)
        return stage in self.manifest.stages

    def matches(
        self, stage: str, settings: Any, inputs: Mapping[str, str], overwrite: bool
    ) -> bool:
        """Whether the stage is there with these settings and inputs, so that it need not run.

        Raises:
            StaleStageError: It is there with others, and `overwrite` is false.
        """
        if overwrite or not self.has(stage):
            return False
        record = self.manifest.stages[stage]
        old = {**record.settings, "inputs": record.inputs}
        refuse_changes(self.root, stage, old, {**plain(settings), "inputs": plain(inputs)})
        return True

    def write(
        self,
        stage: str,
        table: Table,
        settings: Any,
        inputs: Mapping[str, str],
        report: Any,
        overwrite: bool,
    ) -> None:
        """Store a table and its record. At no instant does a record name a table that is not whole.

        Raises:
            StaleStageError: See `matches`.
            PartialResultError: The disk is full or fails; the old table is still whole.
        """
        if self.matches(stage, settings, inputs, overwrite):
            return
        group = group_name(stage)
        scratch, target = self.root / f".{group}.tmp", self.root / group
        needed = sum(array.nbytes for array in table.arrays.values())
        with disk_errors(self.root, needed):
            remove_tree(scratch)
            _write_group(scratch, table)
            fsync_tree(scratch, files=True)
            if self.has(stage):
                self.commit(self.manifest.with_stage(stage, None).with_files({}, under=group))
            remove_tree(target)
            os.rename(scratch, target)
            fsync_folder(self.root)
            found = self.manifest.with_files(file_records(self.root, target), under=group)
            outputs = {group: found.group_digest(group)}
            record = StageRecord(plain(settings), plain(inputs), outputs, plain(report))
            self.commit(found.with_stage(stage, record))

    def commit(self, manifest: Manifest) -> None:
        """Make a manifest durable, then current."""
        self._save(manifest)
        self.manifest = manifest

    def read(self, stage: str) -> Table:
        """Read a table whole, every byte checked.

        Raises:
            StoreError: There is none, or it is damaged.
            StaleStageError: A stage it was made from has been replaced since.
        """
        if not self.has(stage):
            raise StoreError(
                f"artifact has no {stage}: `{self.root}`", f"run the stage that makes {stage}"
            )
        for name, old, new in stale_inputs(self.manifest, stage):
            raise StaleStageError(
                f"{stage} of `{self.root}` was made from another {name}: {old[:12]}, "
                f"now {new[:12]}",
                f"run the stage that makes {stage} again with `--overwrite`",
            )
        group = group_name(stage)
        for name, record in self.manifest.files.items():
            if name.startswith(group + "/"):
                check_file(self.root, name, record)
        return _read_group(self.root / group, self.manifest, group)


def refuse_changes(root: Path, stage: str, old: Any, new: Any) -> None:
    """Refuse to go on with other settings than those on disk.

    Raises:
        StaleStageError: Naming every setting that differs, with both values.
    """
    changes = [f"{name} was {_brief(a)}, now {_brief(b)}" for name, a, b in differences(old, new)]
    if changes:
        more = f" and {len(changes) - 4} more" if len(changes) > 4 else ""
        raise StaleStageError(
            f"{stage} of `{root}` has other settings: {'; '.join(changes[:4])}{more}",
            "pass `--overwrite` to start again, or choose another output",
        )


def stale_inputs(manifest: Manifest, stage: str) -> list[tuple[str, str, str]]:
    """Inputs of a stage that are stages themselves and have other outputs now: name, old, new."""
    return [
        (name, digest, manifest.stage_digest(name))
        for name, digest in manifest.stages[stage].inputs.items()
        if name in manifest.stages and manifest.stage_digest(name) != digest
    ]


def check_file(root: Path, name: str, record: FileRecord) -> None:
    """Compare a file with its record.

    Raises:
        StoreError: It is missing, not plain, or has another size or digest.
    """
    size = regular_size(root / name)
    if size is None:
        raise StoreError(f"artifact file is missing or not a plain file: `{root / name}`")
    if size != record.bytes:
        raise StoreError(
            f"artifact file has the wrong size: `{root / name}`: {size} bytes, "
            f"expected {record.bytes}"
        )
    if sha256_file(root / name) != record.sha256:
        raise StoreError(f"artifact file is damaged: `{root / name}`: SHA-256 differs")


def _brief(value: Any) -> str:
    text = "absent" if value is None else f"`{value}`"
    return f"{text[:13]}...`" if len(text) > 60 else text


def _write_group(folder: Path, table: Table) -> None:
    group = zarr.open_group(str(folder), mode="w", zarr_format=3, attributes=plain(table.attrs))
    for name, array in sorted(table.arrays.items()):
        if not _ARRAY_NAME.fullmatch(name) or array.dtype.kind not in _DTYPES:
            raise ValueError(f"not a table array: {name!r} of {array.dtype}")
        stored = group.create_array(
            name,
            shape=array.shape,
            chunks=tuple(max(1, extent) for extent in array.shape),
            dtype=array.dtype.newbyteorder("<"),
            compressors=None,
            fill_value=0,
            config={"write_empty_chunks": True},
        )
        stored[...] = array


def _read_group(folder: Path, manifest: Manifest, prefix: str) -> Table:
    """Arrays of a group whose files have been checked against the manifest."""
    names = sorted(
        name.split("/")[1]
        for name in manifest.files
        if name.startswith(prefix + "/") and name.count("/") == 2 and name.endswith("/zarr.json")
    )
    try:
        group = zarr.open_group(str(folder), mode="r", zarr_format=3)
        arrays = {name: _read_array(group[name], folder / name) for name in names}
        return Table(arrays, dict(group.attrs))
    except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
        raise StoreError(f"table is damaged: `{folder}`: {error}") from error


def _read_array(array: Any, folder: Path) -> NDArray[Any]:
    """Read one array after its shape has been held against the bytes that are there."""
    if not isinstance(array, zarr.Array) or array.dtype.kind not in _DTYPES:
        raise StoreError(f"table array has an unknown type: `{folder}`")
    if array.compressors or array.filters or array.shards:
        raise StoreError(f"table array uses an unknown codec: `{folder}`")
    chunk = folder / "/".join(["c", *("0" for _ in array.shape)])
    expected = array.nbytes
    if expected and (regular_size(chunk) != expected or array.nchunks != 1):
        raise StoreError(f"table array has the wrong size: `{chunk}`: expected {expected} bytes")
    return np.asarray(array[...])
