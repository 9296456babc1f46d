"""The manifest of an artifact: frozen records <-> canonical JSON that digests itself.

Owns what is written down about an artifact. Knows no file; `manifest_reader` checks untrusted ones.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pw import FORMAT_VERSION
from pw.blocks import ExpertGeometry, Module
from pw_kernels.bitplane import LAYOUT

MANIFEST = "manifest.json"
LUT_DTYPES = ("bfloat16", "float16")


Checksums = NDArray[np.uint32]


@dataclass(frozen=True)
class ModelRecord:
    """Where the weights came from."""

    name: str
    source: str  # the path or repository that was read
    revision: str  # "" when unknown
    architecture: str
    files: Mapping[str, str]  # checkpoint file -> hex SHA-256


@dataclass(frozen=True)
class StageRecord:
    """What a stage was asked, what it read, what it wrote and what it found."""

    settings: Mapping[str, Any]
    inputs: Mapping[str, str]  # name -> digest; a stage's name means that stage's output
    outputs: Mapping[str, str] = field(default_factory=dict)  # file or group -> digest
    report: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class FileRecord:
    """Size and digest of a file that is checked as a whole."""

    bytes: int
    sha256: str


@dataclass(frozen=True, eq=False)
class BlockSums:
    """CRC-32C of every plane and LUT of one (layer, module), each keyed by its place."""

    planes: Checksums  # [E, B]
    luts: Mapping[int, Checksums]  # width -> [E]


BlocksKey = tuple[int, Module]


@dataclass(frozen=True, eq=False)
class Manifest:
    """Everything that is known about an artifact without reading its arrays."""

    tool_version: str
    model: ModelRecord
    geometry: ExpertGeometry
    min_bits: int
    max_bits: int
    lut_dtype: str
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    blocks: Mapping[BlocksKey, BlockSums] = field(default_factory=dict)
    stages: Mapping[str, StageRecord] = field(default_factory=dict)
    layout: str = LAYOUT
    format_version: int = FORMAT_VERSION

    @property
    def widths(self) -> range:
        """Every width that has a LUT."""
        return range(self.min_bits, self.max_bits + 1)

    def with_files(self, files: Mapping[str, FileRecord], under: str = "") -> Manifest:
        """Copy with `files` added, in place of all files below the folder `under` if given."""
        kept = {k: v for k, v in self.files.items() if not under or not k.startswith(under + "/")}
        return replace(self, files={**kept, **files})

    def with_stage(self, name: str, record: StageRecord | None) -> Manifest:
        """Copy with a stage set, or dropped when `record` is None."""
        stages = {k: v for k, v in self.stages.items() if k != name}
        return replace(self, stages=stages if record is None else {**stages, name: record})

    def group_digest(self, group: str) -> str:
        """Digest of a file, or of all files and checksums of a group such as `planes.zarr`."""
        parts: dict[str, Any] = {
            name: record.sha256
            for name, record in self.files.items()
            if name == group or name.startswith(group + "/")
        }
        for key, sums in self.blocks.items():
            if group == "planes.zarr":
                parts[blocks_name(*key)] = _hex(sums.planes)
            elif group == "luts.zarr":
                parts[blocks_name(*key)] = {str(b): _hex(crc) for b, crc in sums.luts.items()}
        return sha256_json(parts)

    def stage_digest(self, name: str) -> str:
        """Digest of a stage's outputs: what a later stage names as its input."""
        return sha256_json(dict(self.stages[name].outputs))


def blocks_name(layer: int, module: Module) -> str:
    """Name of one (layer, module) in the tree, such as `12.gate_up`."""
    return f"{layer}.{module}"


def plain(value: Any) -> Any:
    """JSON-ready copy of settings: dataclasses, paths, tuples and numpy values become plain ones.

    A float that is not finite becomes null: JSON has no word for it.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"not a setting that JSON can hold: {type(value).__name__}")


def canonical_json(value: Any) -> bytes:
    """The one way this store writes a JSON value."""
    text = json.dumps(value, sort_keys=True, indent=1, allow_nan=False)
    return text.encode("ascii") + b"\n"


def sha256_json(value: Any) -> str:
    """Hex SHA-256 of the canonical form."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def differences(old: Any, new: Any, name: str = "") -> list[tuple[str, Any, Any]]:
    """Dotted names at which two JSON values differ, with both values; None where one has none."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        found = []
        for key in sorted(old.keys() | new.keys()):
            below = f"{name}.{key}" if name else key
            found += differences(old.get(key), new.get(key), below)
        return found
    return [] if old == new else [(name, old, new)]


def to_bytes(manifest: Manifest) -> bytes:
    """Canonical JSON with the digest of the rest in `digest`."""
    body = {
        "format_version": manifest.format_version,
        "tool_version": manifest.tool_version,
        "model": plain(manifest.model),
        "geometry": plain(manifest.geometry),
        "min_bits": manifest.min_bits,
        "max_bits": manifest.max_bits,
        "lut_dtype": manifest.lut_dtype,
        "layout": manifest.layout,
        "files": plain(manifest.files),
        "blocks": {blocks_name(*k): sums_to_json(s) for k, s in manifest.blocks.items()},
        "stages": plain(manifest.stages),
    }
    return canonical_json({**body, "digest": sha256_json(body)})


def sums_to_json(sums: BlockSums) -> dict[str, Any]:
    """Checksums as hex strings, eight digits each, expert by expert."""
    return {"planes": _hex(sums.planes), "luts": {str(b): _hex(c) for b, c in sums.luts.items()}}


def _hex(sums: Checksums) -> str:
    return sums.astype(">u4").tobytes().hex()
