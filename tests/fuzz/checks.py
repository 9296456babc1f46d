"""What must hold for any bytes at all, shared by seeded and coverage-guided fuzzing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from pw.errors import ModelError, PwError, StoreError
from pw.models.header import read_header
from pw.models.shards import INDEX, ShardIndex
from pw.store import Artifact
from pw.store.manifest import canonical_json, sha256_json, to_bytes
from pw.store.manifest_reader import from_bytes
from pw.store.tables import TABLES


def _one_line(error: PwError) -> None:
    assert "\n" not in error.message, error.message
    assert len(error.message) < 2000, error.message


def check_header(file: Path, data: bytes) -> bool:
    """Whether a file is accepted; if so, the format's own reader accepts it and agrees."""
    file.write_bytes(data)
    try:
        entries = read_header(file)
    except ModelError as refused:
        _one_line(refused)
        return False
    try:
        with safe_open(file, "numpy") as theirs:
            assert set(theirs.keys()) == set(entries)
            for name, entry in entries.items():
                assert tuple(theirs.get_slice(name).get_shape()) == entry.shape
    except SafetensorError as error:
        # Dtypes newer than either reader are refused when such a tensor is wanted.
        if "unknown variant" not in str(error):
            raise AssertionError(data) from error
    for entry in entries.values():
        assert 8 <= entry.start <= entry.stop <= len(data)
    return True


def check_index(folder: Path, data: bytes) -> None:
    """A shard index leads to nothing but files of its folder."""
    (folder / INDEX).write_bytes(data)
    try:
        shards = ShardIndex.open(folder)
    except ModelError as refused:
        _one_line(refused)
    else:
        assert {file.parent for file in shards.files} <= {folder}


def signed(body: Any) -> bytes:
    """A manifest whose own digest is right."""
    body.pop("digest", None)
    return canonical_json({**body, "digest": sha256_json(body)})


def check_manifest(artifact: Path, data: bytes) -> None:
    """A manifest is read as what it says and as nothing else; opening it is safe."""
    try:
        manifest = from_bytes(data, artifact / "manifest.json")
    except StoreError as refused:
        _one_line(refused)
        return
    assert json.loads(to_bytes(manifest)) == json.loads(data)
    (artifact / "manifest.json").write_bytes(data)
    try:
        opened = Artifact.open(artifact)
        for stage in manifest.stages.keys() & set(TABLES):
            opened.table(stage)
    except PwError as refused:
        _one_line(refused)
