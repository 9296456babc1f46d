"""Reads a manifest as what it is, input from a stranger: known keys, types and ranges before use.

Owns every limit on what a manifest may say. Knows no array and no folder.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from pw import FORMAT_VERSION
from pw.blocks import MODULES, BlockShape, ExpertGeometry
from pw.errors import StoreError
from pw.store.files import read_bounded
from pw.store.manifest import (
    LUT_DTYPES,
    BlocksKey,
    BlockSums,
    Checksums,
    FileRecord,
    Manifest,
    ModelRecord,
    StageRecord,
    blocks_name,
    canonical_json,
    sha256_json,
)
from pw_kernels.bitplane import LAYOUT

FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,127}")

_MANIFEST_LIMIT = 1 << 28  # bytes
_HEX = re.compile(r"[0-9a-f]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LIMITS = {"layers": 1 << 12, "experts": 1 << 14, "extent": 1 << 20, "bytes": 1 << 48}


def load(path: Path) -> Manifest:
    """Read and check a manifest file.

    Raises:
        StoreError: Missing, damaged, written by a newer format, or not what this format allows.
    """
    return from_bytes(read_bounded(path, _MANIFEST_LIMIT), path)


def from_bytes(data: bytes, path: Path) -> Manifest:
    """Parse and check the bytes of a manifest; `path` is for messages only."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"manifest is damaged: `{path}`: not JSON") from error
    version = body.get("format_version") if isinstance(body, dict) else None
    if type(version) is not int or version < 1:
        raise StoreError(f"not the manifest of an artifact: `{path}`")
    if version > FORMAT_VERSION:
        raise StoreError(
            f"artifact has a newer format: `{path}`: version {version}, "
            f"this program reads up to {FORMAT_VERSION}",
            "upgrade pagedweight",
        )
    digest = body.pop("digest", None)
    try:
        intact = digest == sha256_json(body) and canonical_json({**body, "digest": digest}) == data
    except ValueError:  # NaN and lone surrogates are not canonical
        intact = False
    if not intact:
        raise StoreError(f"manifest is damaged: `{path}`: it does not match its own digest")
    return _Reader(path).manifest(body)


def sums_from_json(value: Any, experts: int, widths: range, path: Path) -> BlockSums:
    """Inverse of `manifest.sums_to_json` with the sizes that the geometry demands."""
    return _Reader(path).sums(value, experts, widths, "checksums")


class _Reader:
    """Typed access to untrusted JSON; every refusal names the file and the field."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def refuse(self, where: str, expected: str) -> StoreError:
        return StoreError(f"manifest is not valid: `{self._path}`: `{where}` must be {expected}")

    def fields(self, value: Any, names: tuple[str, ...], where: str) -> list[Any]:
        if not isinstance(value, dict) or set(value) != set(names):
            raise self.refuse(where, f"an object with exactly the keys {', '.join(names)}")
        return [value[name] for name in names]

    def mapping(self, value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.refuse(where, "an object")
        return value

    def text(self, value: Any, where: str) -> str:
        if not isinstance(value, str) or len(value) > 4096:
            raise self.refuse(where, "a string of at most 4096 characters")
        return value

    def integer(self, value: Any, low: int, high: int, where: str) -> int:
        if type(value) is not int or not low <= value <= high:
            raise self.refuse(where, f"an integer from {low} to {high}")
        return value

    def digest(self, value: Any, where: str) -> str:
        if not isinstance(value, str) or not _SHA256.fullmatch(value):
            raise self.refuse(where, "a SHA-256 in lower-case hex")
        return value

    def relative(self, name: str, where: str) -> str:
        parts = name.split("/")
        if len(parts) > 8 or not all(FILE_NAME.fullmatch(part) for part in parts):
            raise self.refuse(f"{where}.{name}", "a plain relative path")
        return name

    def manifest(self, body: Any) -> Manifest:
        names = tuple(f.name for f in dataclasses.fields(Manifest))
        values = dict(zip(names, self.fields(body, names, "manifest"), strict=True))
        if values["layout"] != LAYOUT:
            found = "".join(filter(str.isprintable, str(values["layout"])[:40]))
            raise StoreError(
                f"artifact has another plane layout: `{self._path}`: `{found}`, "
                f"this program reads `{LAYOUT}`",
                "quantize the model again",
            )
        if values["lut_dtype"] not in LUT_DTYPES:
            raise self.refuse("lut_dtype", " or ".join(LUT_DTYPES))
        geometry = self.geometry(values["geometry"])
        min_bits = self.integer(values["min_bits"], 2, 8, "min_bits")
        max_bits = self.integer(values["max_bits"], min_bits, 8, "max_bits")
        widths = range(min_bits, max_bits + 1)
        return Manifest(
            tool_version=self.text(values["tool_version"], "tool_version"),
            model=self.model(values["model"]),
            geometry=geometry,
            min_bits=min_bits,
            max_bits=max_bits,
            lut_dtype=values["lut_dtype"],
            files=self.files(values["files"]),
            blocks=self.blocks(values["blocks"], geometry, widths),
            stages=self.stages(values["stages"]),
        )

    def model(self, value: Any) -> ModelRecord:
        names = ("name", "source", "revision", "architecture", "files")
        *values, files = self.fields(value, names, "model")
        name, source, revision, architecture = (
            self.text(text, f"model.{field}") for field, text in zip(names, values, strict=False)
        )
        hashes = self.mapping(files, "model.files")
        digests = {k: self.digest(v, f"model.files.{k}") for k, v in hashes.items()}
        return ModelRecord(name, source, revision, architecture, digests)

    def geometry(self, value: Any) -> ExpertGeometry:
        names = ("layers", "experts", "top_k", "gate_up", "down")
        layers, experts, top_k, gate_up, down = self.fields(value, names, "geometry")
        limit = _LIMITS["layers"]
        if not isinstance(layers, list) or not 1 <= len(layers) <= limit:
            raise self.refuse("geometry.layers", f"a list of 1 to {limit} layers")
        for layer in layers:
            self.integer(layer, 0, limit, "geometry.layers")
        if layers != sorted(set(layers)):
            raise self.refuse("geometry.layers", "ascending without repetition")
        experts = self.integer(experts, 1, _LIMITS["experts"], "geometry.experts")
        return ExpertGeometry(
            layers=tuple(layers),
            experts=experts,
            top_k=self.integer(top_k, 1, experts, "geometry.top_k"),
            gate_up=self.shape(gate_up, "geometry.gate_up"),
            down=self.shape(down, "geometry.down"),
        )

    def shape(self, value: Any, where: str) -> BlockShape:
        rows, cols = self.fields(value, ("rows", "cols"), where)
        limit = _LIMITS["extent"]
        return BlockShape(
            self.integer(rows, 1, limit, f"{where}.rows"),
            self.integer(cols, 1, limit, f"{where}.cols"),
        )

    def files(self, value: Any) -> dict[str, FileRecord]:
        found = {}
        for name, record in self.mapping(value, "files").items():
            where = f"files.{name}"
            size, digest = self.fields(record, ("bytes", "sha256"), where)
            size = self.integer(size, 0, _LIMITS["bytes"], f"{where}.bytes")
            path = self.relative(name, "files")
            found[path] = FileRecord(size, self.digest(digest, f"{where}.sha256"))
        return found

    def blocks(
        self, value: Any, geometry: ExpertGeometry, widths: range
    ) -> dict[BlocksKey, BlockSums]:
        known: dict[str, BlocksKey] = {
            blocks_name(layer, module): (layer, module)
            for layer in geometry.layers
            for module in MODULES
        }
        found = {}
        for name, sums in self.mapping(value, "blocks").items():
            if name not in known:
                raise self.refuse(f"blocks.{name}", "a layer and module of the geometry")
            found[known[name]] = self.sums(sums, geometry.experts, widths, f"blocks.{name}")
        return found

    def sums(self, value: Any, experts: int, widths: range, where: str) -> BlockSums:
        planes, luts = self.fields(value, ("planes", "luts"), where)
        names = tuple(str(bits) for bits in widths)
        tables = self.fields(luts, names, f"{where}.luts")
        return BlockSums(
            planes=self.crcs(planes, experts * widths[-1], where).reshape(experts, widths[-1]),
            luts={b: self.crcs(t, experts, where) for b, t in zip(widths, tables, strict=True)},
        )

    def crcs(self, value: Any, count: int, where: str) -> Checksums:
        if not isinstance(value, str) or len(value) != 8 * count or not _HEX.fullmatch(value):
            raise self.refuse(where, f"{count} checksums of eight hex digits")
        return np.frombuffer(bytes.fromhex(value), ">u4").astype(np.uint32)

    def stages(self, value: Any) -> dict[str, StageRecord]:
        names = ("settings", "inputs", "outputs", "report")
        found = {}
        for stage, record in self.mapping(value, "stages").items():
            where = f"stages.{self.relative(stage, 'stages')}"
            parts = [
                self.mapping(part, f"{where}.{name}")
                for name, part in zip(names, self.fields(record, names, where), strict=True)
            ]
            for digests, name in ((parts[1], "inputs"), (parts[2], "outputs")):
                for key, digest in digests.items():
                    self.text(digest, f"{where}.{name}.{key}")
            found[stage] = StageRecord(*parts)
        return found
