"""Builds an artifact in `<name>.partial/` and publishes it with one rename.

Owns the order of writes that makes a kill at any instant harmless. Knows no quantization.

    X.pw.partial/                 becomes X.pw/ when everything is there
      planes.zarr/ luts.zarr/     arrays of finished (layer, module) pairs, moved in whole
      dense.safetensors ...       copied files and tables
      .build/draft.json           identity, settings, tables and files so far (a manifest)
      .build/blocks/<l>.<m>.json  checksums of a finished (layer, module), written last
      .build/stage/               the (layer, module) being written
      manifest.json               written last of all; .build is deleted after it
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

import pw
from pw.blocks import ExpertGeometry, Module
from pw.errors import DamagedModelError, PartialResultError, PwError, StoreError
from pw.store.artifact import DENSE, QUANTIZE, Artifact
from pw.store.files import (
    WriteLock,
    disk_errors,
    disk_full,
    existing_parent,
    fsync_file,
    fsync_folder,
    fsync_tree,
    remove_tree,
    replace_file,
    sha256_file,
)
from pw.store.manifest import (
    MANIFEST,
    BlocksKey,
    BlockSums,
    FileRecord,
    Manifest,
    ModelRecord,
    StageRecord,
    blocks_name,
    canonical_json,
    plain,
    sums_to_json,
    to_bytes,
)
from pw.store.manifest_reader import FILE_NAME
from pw.store.planes import (
    LUTS,
    PLANES,
    PayloadLayout,
    lut_words,
    plane_words,
    write_arrays,
    write_groups,
)
from pw.store.publish import (
    BUILD,
    DRAFT,
    anything_done,
    make_place,
    read_record,
    refuse_other,
    resumable,
    swap_in,
)
from pw.store.tables import Table, TableFolder
from pw.store.tensor_file import TensorSource, write_tensors

MODEL_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "tokenizer.model", "vocab.json", "merges.txt",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip


class ArtifactWriter:
    """Writes an artifact piece by piece; each piece is complete or absent.

    A writer opened on work that an earlier run left says what is `done` and skips it. Opened on a
    finished artifact with the same settings it is `complete`, and `publish` returns that artifact.
    """

    def __init__(self, path: Path, folder: Path, manifest: Manifest, lock: WriteLock) -> None:
        self.path = path
        self._folder = folder
        self._build = folder / BUILD
        self._layout = PayloadLayout(manifest)
        self._lock = lock
        self._tables = TableFolder(folder, manifest, self._save)
        self._done: dict[BlocksKey, BlockSums] = dict(manifest.blocks)

    @classmethod
    def open(
        cls,
        path: str | Path,
        model: ModelRecord,
        geometry: ExpertGeometry,
        min_bits: int,
        max_bits: int,
        lut_dtype: torch.dtype,
        settings: Any,
        overwrite: bool = False,
        *,
        beside: bool = False,
    ) -> ArtifactWriter:
        """Start or resume an artifact.

        Args:
            path: Final folder, `X.pw`.
            model: Provenance; its file digests are compared on resume.
            geometry: Layers, experts, shapes.
            min_bits: Narrowest width.
            max_bits: Widest width, the number of planes.
            lut_dtype: torch.bfloat16 or torch.float16.
            settings: Mapping or config dataclass of everything that decides the bytes.
            overwrite: Build anew; work of an earlier run with these settings still resumes.
            beside: Help the process that holds the lock: write some of the blocks, nothing else.

        Raises:
            StaleStageError: There is work with other settings, and `overwrite` is false.
            StoreError: Another process is writing it.
            PartialResultError: The disk has no room for the planes and LUTs.
        """
        path = Path(path)
        manifest = Manifest(
            tool_version=pw.__version__,
            model=model,
            geometry=geometry,
            min_bits=min_bits,
            max_bits=max_bits,
            lut_dtype=str(lut_dtype).removeprefix("torch."),
            stages={QUANTIZE: StageRecord(plain(settings), {})},
        )
        if not beside:
            make_place(path)
        lock = WriteLock(path)
        if beside:
            return cls._open_locked(path, manifest, lock, overwrite)
        lock.acquire()
        try:
            return cls._open_locked(path, manifest, lock, overwrite)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def _open_locked(
        cls, path: Path, wanted: Manifest, lock: WriteLock, overwrite: bool
    ) -> ArtifactWriter:
        partial = path.with_name(f"{path.name}.partial")
        if (partial / MANIFEST).exists():  # killed between the manifest and the rename
            swap_in(partial, path)
        if (path / MANIFEST).exists() and not overwrite:
            finished = Artifact.open(path).manifest
            refuse_other(path, finished, wanted)
            return cls(path, path, finished, lock)
        if path.exists() and not (path / MANIFEST).exists():
            raise StoreError(
                f"output exists and is not an artifact: `{path}`",
                "remove it first, or name another folder",
            )
        found = resumable(partial, wanted, overwrite)
        writer = cls(path, partial, found or wanted, lock)
        writer._prepare(fresh=found is None)
        return writer

    def _prepare(self, fresh: bool) -> None:
        """Make the folders, find finished blocks, and see that the rest fits on the disk."""
        with disk_errors(self._folder, self.bytes_needed()):
            if fresh:
                remove_tree(self._folder)
            for folder in ("blocks", "stage"):
                (self._build / folder).mkdir(parents=True, exist_ok=True)
            write_groups(self._folder)
            if fresh:
                self._save(self._tables.manifest)
        self.find_done()
        if shutil.disk_usage(existing_parent(self._folder)).free < self.bytes_needed():
            raise disk_full(self._folder, self.bytes_needed())

    def __enter__(self) -> ArtifactWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        refused = isinstance(error, PwError) and not isinstance(error, PartialResultError)
        mine = self._lock.held and not self.complete
        useless = isinstance(error, DamagedModelError)  # another checkpoint does not go on with it
        if refused and mine and (useless or not anything_done(self._folder, self.manifest)):
            remove_tree(self._folder)
        self.close()

    def close(self) -> None:
        """Let others write; what is done stays for a later run."""
        self._lock.release()

    @property
    def complete(self) -> bool:
        """Whether the artifact was already finished with these settings."""
        return self._folder == self.path

    @property
    def manifest(self) -> Manifest:
        """What has been recorded so far."""
        return self._tables.manifest

    @property
    def dense_done(self) -> bool:
        """Whether the dense weights have been written."""
        return DENSE in self.manifest.files

    def bytes_needed(self) -> int:
        """Bytes of planes and LUTs still to be written."""
        return sum(
            self._layout.payload_bytes(module)
            for layer, module in self._layout.blocks()
            if (layer, module) not in self._done
        )

    def done(self, layer: int, module: Module) -> bool:
        """Whether the blocks of one (layer, module) are written, of all experts."""
        return (layer, module) in self._done

    def find_done(self) -> None:
        """Learn which blocks other processes have written."""
        for layer, module in self._layout.blocks() if not self.complete else ():
            if (layer, module) not in self._done:
                sums = read_record(self._record(layer, module), self._layout)
                if sums is not None:
                    self._done[layer, module] = sums

    def write_blocks(
        self,
        layer: int,
        module: Module,
        planes: Tensor,  # [E, B, tiles, 128] int32
        luts: Mapping[int, Tensor],  # width -> [E, N or N padded, 2^width], kernel order
    ) -> None:
        """Write planes and LUTs of all experts of one (layer, module), atomically.

        Raises:
            PartialResultError: Disk full; the folder resumes.
        """
        if self.done(layer, module):
            return
        words = plane_words(self._layout, module, planes)
        tables = lut_words(self._layout, module, luts)
        stage = self._build / "stage" / blocks_name(layer, module)
        with disk_errors(self._folder, self.bytes_needed()):
            remove_tree(stage)
            sums = write_arrays(stage, self._layout, layer, module, words, tables)
            fsync_tree(stage, files=False)
            for group in (PLANES, LUTS):
                for array in sorted((stage / group).iterdir()):
                    remove_tree(self._folder / group / array.name)
                    os.rename(array, self._folder / group / array.name)
                fsync_folder(self._folder / group)
            replace_file(self._record(layer, module), canonical_json(sums_to_json(sums)))
            remove_tree(stage)
        self._done[layer, module] = sums

    def write_dense(self, tensors: Mapping[str, TensorSource]) -> None:
        """Write every tensor that is not a routed expert, byte for byte, to one safetensors file.

        They are read one at a time.

        Raises:
            PartialResultError: Disk full; the folder resumes.
        """
        if self.dense_done:
            return
        needed = sum(source.nbytes for source in tensors.values())
        scratch = self._build / DENSE
        with disk_errors(self._folder, needed):
            write_tensors(scratch, tensors)
            self._move_in({DENSE: scratch})

    def copy_files(self, source: str | Path, names: Iterable[str] = MODEL_FILES) -> None:
        """Copy those of `names` that `source` has: configuration, tokenizer, templates.

        Raises:
            PartialResultError: Disk full; the folder resumes.
        """
        found = [name for name in names if (Path(source) / name).is_file()]
        for name in found:
            if not FILE_NAME.fullmatch(name):
                raise ValueError(f"not a plain file name: {name!r}")
        missing = [name for name in found if name not in self.manifest.files]
        scratch = {name: self._build / name for name in missing}
        needed = sum((Path(source) / name).stat().st_size for name in missing)
        with disk_errors(self._folder, needed):
            for name, copy in scratch.items():
                shutil.copyfile(Path(source) / name, copy)
                fsync_file(copy)
            self._move_in(scratch)

    def _move_in(self, files: Mapping[str, Path]) -> None:
        """Move finished files from the build folder into the artifact and record them."""
        records = {n: FileRecord(p.stat().st_size, sha256_file(p)) for n, p in files.items()}
        for name, path in files.items():
            os.replace(path, self._folder / name)
        fsync_folder(self._folder)
        self._tables.commit(self.manifest.with_files(records))

    def has_table(self, stage: str) -> bool:
        """As `Artifact.has_table`, on the folder being built."""
        return self._tables.has(stage)

    def table(self, stage: str) -> Table:
        """As `Artifact.table`, on the folder being built."""
        return self._tables.read(stage)

    def table_done(
        self, stage: str, settings: Any, inputs: Mapping[str, str], overwrite: bool = False
    ) -> bool:
        """As `Artifact.table_done`, on the folder being built."""
        return self._tables.matches(stage, settings, inputs, overwrite)

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
        """As `Artifact.write_table`, on the folder being built."""
        table = Table(dict(arrays), dict(attrs))
        self._tables.write(stage, table, settings, inputs, report, overwrite)

    def publish(self, report: Any = None) -> Artifact:
        """Finish the artifact: manifest last, then one rename. Closes the writer.

        Args:
            report: JSON values of the quantize stage for `pw inspect`.

        Raises:
            StoreError: Blocks or the dense weights are missing.
            PartialResultError: Disk full; the folder resumes.
        """
        with self:
            if not self.complete:
                self._check_complete()
                with disk_errors(self._folder, 0):
                    manifest = self._final_manifest(plain(report or {}))
                    replace_file(self._folder / MANIFEST, to_bytes(manifest))
                    swap_in(self._folder, self.path)
            return Artifact.open(self.path)

    def _check_complete(self) -> None:
        blocks = self._layout.blocks()
        missing = [key for key in blocks if key not in self._done]
        if missing:
            layer, module = missing[0]
            raise StoreError(
                f"artifact is incomplete: `{self.path}`: expected blocks of {len(blocks)} "
                f"(layer, module) pairs, found {len(self._done)}; first missing: layer {layer} "
                f"{module}"
            )
        if not self.dense_done:
            raise StoreError(f"artifact is incomplete: `{self.path}`: no dense weights")

    def _final_manifest(self, report: dict[str, Any]) -> Manifest:
        metadata = {
            name: FileRecord((self._folder / name).stat().st_size, sha256_file(self._folder / name))
            for name in self._layout.metadata_names()
        }
        manifest = replace(self.manifest.with_files(metadata), blocks=self._done)
        outputs = {name: manifest.group_digest(name) for name in (PLANES, LUTS, DENSE)}
        inputs = {
            stage: manifest.stage_digest(stage) for stage in manifest.stages if stage != QUANTIZE
        }
        settings = manifest.stages[QUANTIZE].settings
        return manifest.with_stage(QUANTIZE, StageRecord(settings, inputs, outputs, report))

    def _record(self, layer: int, module: Module) -> Path:
        return self._build / "blocks" / f"{blocks_name(layer, module)}.json"

    def _save(self, manifest: Manifest) -> None:
        """Make a manifest durable: the draft, or the real one when tables are added afterwards."""
        target = self.path / MANIFEST if self.complete else self._build / DRAFT
        replace_file(target, to_bytes(manifest))
