"""A finished artifact: reads planes, LUTs and tables, adds tables. Knows no quantization, no pages.

The format is described byte by byte in `artifacts/README.md`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pw.blocks import BlockKey, ExpertGeometry
from pw.errors import StoreError
from pw.store.files import (
    WriteLock,
    open_regular,
    read_exact,
    replace_file,
    sha256_file,
    tree_sizes,
)
from pw.store.manifest import MANIFEST, Checksums, Manifest, to_bytes
from pw.store.manifest_reader import load
from pw.store.planes import PayloadLayout, Shard, crc, lut_part, plane_part
from pw.store.tables import Table, TableFolder
from pw_kernels.bitplane import padded_rows

DENSE = "dense.safetensors"
QUANTIZE = "quantize"  # the stage that makes the artifact itself

_TABLE_SIZES = [1 << power for power in range(9, 22)]  # 512 bytes, a row of 8 bits, to 2 MiB


class Artifact:
    """An artifact folder whose manifest and file sizes have been checked.

    Reads check the checksum of what they read, so that damage is found before it is used.
    Reading is thread-safe; `write_table` is for one thread.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self._tables = TableFolder(path, manifest, self._save)
        self._layout = PayloadLayout(manifest)
        self._planes: dict[tuple[int, str], Checksums] = {}
        self._luts: dict[tuple[int, str, int], Checksums] = {}
        for (layer, module), sums in manifest.blocks.items():
            self._planes[layer, module] = sums.planes
            self._luts.update({(layer, module, b): crcs for b, crcs in sums.luts.items()})

    @classmethod
    def open(cls, path: str | Path) -> Artifact:
        """Open an artifact; takes milliseconds and reads no array.

        Raises:
            StoreError: Not an artifact, incomplete, damaged, with symlinks inside, or written by a
                newer format or with another plane layout.
        """
        path = Path(path)
        if not (path / MANIFEST).exists():
            raise missing_artifact(path)
        manifest = load(path / MANIFEST)
        check_sizes(path, manifest)
        return cls(path, manifest)

    @property
    def manifest(self) -> Manifest:
        """What is written down about the artifact."""
        return self._tables.manifest

    @property
    def model_name(self) -> str:
        """What the model is called."""
        return self.manifest.model.name

    @property
    def geometry(self) -> ExpertGeometry:
        """Layers, experts and block shapes."""
        return self.manifest.geometry

    @property
    def min_bits(self) -> int:
        """Narrowest width."""
        return self.manifest.min_bits

    @property
    def max_bits(self) -> int:
        """Widest width, the number of planes of every block."""
        return self.manifest.max_bits

    @property
    def lut_dtype(self) -> torch.dtype:
        """Type of LUT entries, bfloat16 or float16."""
        return self._layout.lut_dtype

    @property
    def table_bytes(self) -> int | None:
        """Bytes after which a LUT says the same again, where rows share their tables.

        Raises:
            StoreError: The manifest says what cannot be.
        """
        focus = self.manifest.stages[QUANTIZE].settings.get("focus")
        found = focus.get("table_bytes") if isinstance(focus, Mapping) else None
        if found is None:
            return None
        if not isinstance(found, int) or found not in _TABLE_SIZES:
            raise StoreError(
                f"artifact is damaged: `{self.path}`: table_bytes is {found!r}, "
                f"expected a power of two from {_TABLE_SIZES[0]} to {_TABLE_SIZES[-1]}",
                "make it again with `pw tune --overwrite`",
            )
        return found

    @property
    def dense_file(self) -> Path:
        """The safetensors file of all tensors that are not routed experts, original names."""
        return self.path / DENSE

    @property
    def artifact_hash(self) -> str:
        """Hex SHA-256 of the manifest, and through it of every byte of the artifact."""
        return sha256_file(self.path / MANIFEST)

    def read_planes(
        self,
        key: BlockKey,
        first: int,
        count: int,
        out: memoryview | NDArray[np.uint8],  # [count * plane_bytes], writable
        *,
        check: bool = True,
    ) -> None:
        """Read planes `first` .. `first + count - 1` of a block with one `preadv`.

        Args:
            key: The block.
            first: First plane, 0 = most significant.
            count: Number of planes.
            out: Where they go, one after the other.
            check: Compare each plane with its checksum.

        Raises:
            StoreError: The file is damaged; the message names file, block and plane.
        """
        self._check_key(key)
        if first < 0 or count < 1 or first + count > self.max_bits:
            raise ValueError(f"planes {first}..{first + count - 1} of {self.max_bits}")
        shard = self._layout.plane_shard(key.layer, key.module, key.expert)
        data = self._read(shard, first, count, out)
        for i, part in enumerate(data.reshape(count, -1) if check else ()):
            plane = first + i
            if (
                crc(part, key, plane_part(plane))
                != self._planes[key.layer, key.module][key.expert, plane]
            ):
                raise StoreError(f"damaged plane: `{self.path / shard.name}`: {key} plane {plane}")

    def read_lut(
        self,
        key: BlockKey,
        bits: int,
        out: memoryview | NDArray[np.uint8],  # [lut_bytes], writable
        *,
        check: bool = True,
    ) -> None:
        """Read the LUT of one width of a block, [N padded, 2^bits] entries in kernel order.

        Raises:
            StoreError: The file is damaged; the message names file, block and width.
        """
        self._check_key(key)
        if bits not in self.manifest.widths:
            raise ValueError(f"no LUT of {bits} bits, widths {self.min_bits}..{self.max_bits}")
        shard = self._layout.lut_shard(key.layer, key.module, bits)
        data = self._read(shard, key.expert, 1, out)
        if (
            check
            and crc(data, key, lut_part(bits))
            != self._luts[key.layer, key.module, bits][key.expert]
        ):
            raise StoreError(f"damaged LUT: `{self.path / shard.name}`: {key} {bits} bits")

    def lut(self, key: BlockKey, bits: int) -> Tensor:
        """LUT [N padded, 2^bits] of a block in kernel order, in `lut_dtype`."""
        rows = padded_rows(self.geometry.shape(key.module).rows)
        values = np.empty((rows, 1 << bits), np.int16)
        self.read_lut(key, bits, values.view(np.uint8).reshape(-1))
        return torch.from_numpy(values).view(self.lut_dtype)

    def _check_key(self, key: BlockKey) -> None:
        known = (key.layer, key.module) in self._planes
        if not known or not 0 <= key.expert < self.geometry.experts:
            raise ValueError(f"artifact has no such block: {key}")

    def _read(
        self, shard: Shard, first: int, count: int, out: memoryview | NDArray[np.uint8]
    ) -> NDArray[np.uint8]:
        data = np.frombuffer(out, np.uint8)
        if data.nbytes != count * shard.chunk_bytes:
            raise ValueError(f"out has {data.nbytes} bytes, need {count * shard.chunk_bytes}")
        path = self.path / shard.name
        with open_regular(path) as descriptor:
            read_exact(descriptor, data.data, first * shard.chunk_bytes, path)
        return data

    def has_table(self, stage: str) -> bool:
        """Whether a stage has left its table."""
        return self._tables.has(stage)

    def table(self, stage: str) -> Table:
        """Arrays and attributes of a stage.

        Raises:
            StoreError: There is none, or it is damaged.
            StaleStageError: A stage it was made from has been replaced since.
        """
        return self._tables.read(stage)

    def table_done(
        self, stage: str, settings: Any, inputs: Mapping[str, str], overwrite: bool = False
    ) -> bool:
        """Whether a stage need not run: its table is there with these settings and inputs.

        Raises:
            StaleStageError: It is there with others, and `overwrite` is false.
        """
        return self._tables.matches(stage, settings, inputs, overwrite)

    def digests(self, *stages: str) -> dict[str, str]:
        """Digests of what earlier stages left, in the form that `inputs` wants."""
        return {stage: self.manifest.stage_digest(stage) for stage in stages}

    def write_table(
        self,
        stage: str,
        arrays: Mapping[str, NDArray[Any]],
        attrs: Mapping[str, Any],
        settings: Any,
        inputs: Mapping[str, str],
        report: Any,
        overwrite: bool = False,
    ) -> None:
        """Add a stage's table, atomically. The same settings and inputs again change nothing.

        Args:
            stage: One of `TABLES`.
            arrays: Name -> array of bool, int or float.
            attrs: JSON values kept beside the arrays.
            settings: Mapping or config dataclass that decides the result.
            inputs: Name -> digest of what was read, see `digests`.
            report: JSON values for `pw inspect`.
            overwrite: Replace a table with other settings or inputs.

        Raises:
            StaleStageError: Present with others, and `overwrite` is false.
            StoreError: Another process writes this artifact.
            PartialResultError: Disk full; the artifact is as before.
        """
        with WriteLock(self.path):
            self._tables.manifest = load(self.path / MANIFEST)
            table = Table(dict(arrays), dict(attrs))
            self._tables.write(stage, table, settings, inputs, report, overwrite)

    def check_writable(self) -> None:
        """Refuse before the work where `write_table` would refuse after it.

        Raises:
            StoreError: Another process writes this artifact, or this user may not.
        """
        with WriteLock(self.path):
            if not os.access(self.path, os.W_OK):
                raise StoreError(
                    f"this user may not write into `{self.path}`", "copy it to where you may"
                )

    def _save(self, manifest: Manifest) -> None:
        replace_file(self.path / MANIFEST, to_bytes(manifest))


def missing_artifact(path: Path) -> StoreError:
    """The error for a folder without a manifest, by what is found there."""
    if Path(f"{path}.partial").is_dir() and not path.exists():
        return StoreError(
            f"artifact is incomplete: `{path}` is still being built",
            f"run `pw quantize MODEL -o {quote(str(path))}` again: it resumes",
        )
    found = f"no `{MANIFEST}` in it" if path.is_dir() else "no such folder"
    line = f"pw calibrate MODEL -o {quote(str(path))}"
    return StoreError(f"not an artifact: `{path}`: {found}", f"make one: `{line}`")


def check_sizes(path: Path, manifest: Manifest) -> None:
    """Hold every expected file against the tree: there, plain, and of the exact size.

    Raises:
        StoreError: Naming the first file that is wrong.
    """
    found = tree_sizes(path)
    for name, size in expected_sizes(manifest, path).items():
        if name not in found:
            raise StoreError(f"artifact file is missing: `{path / name}`")
        if found[name] != size:
            raise StoreError(
                f"artifact file has the wrong size: `{path / name}`: {found[name]} bytes, "
                f"expected {size}"
            )


def expected_sizes(manifest: Manifest, path: Path) -> dict[str, int]:
    """Bytes of every file of an artifact but the manifest.

    Raises:
        StoreError: The manifest lacks a file or a block that its geometry demands.
    """
    layout = PayloadLayout(manifest)
    sizes = {name: record.bytes for name, record in manifest.files.items()}
    for name in sorted({DENSE, *layout.metadata_names()} - sizes.keys()):
        raise StoreError(f"manifest is not valid: `{path / MANIFEST}`: no record of `{name}`")
    for layer, module in layout.blocks():
        if (layer, module) not in manifest.blocks:
            where = f"layer {layer} {module}"
            raise StoreError(f"manifest is not valid: `{path / MANIFEST}`: no checksums of {where}")
        sizes.update({shard.name: shard.file_bytes for shard in layout.shards(layer, module)})
    return sizes
