"""The safetensors files of a checkpoint: headers read at once, tensors one at a time.

Knows file names, byte ranges and dtypes; knows no model. Reads are positioned reads into fresh
memory: a mapping would count whole shards as resident while experts stream by.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from pw.errors import ModelError
from pw.models.header import DTYPES, INCOMPLETE, UNQUANTIZED, TensorEntry, read_header, some
from pw.models.pointers import refuse_pointer

INDEX = "model.safetensors.index.json"
_MAX_NAME = 255  # bytes of a file name in common file systems


class ShardIndex:
    """All tensors of a checkpoint folder by their names on disk."""

    def __init__(self, entries: Mapping[str, TensorEntry]) -> None:
        self._entries = dict(entries)
        self.bytes_read = 0  # by `read`, so far

    @classmethod
    def open(cls, path: Path) -> ShardIndex:
        """Read the headers of all weight files below `path`; no tensor is read.

        Raises:
            ModelError: No safetensors, a missing or truncated shard, or an index that names
                tensors its shards do not hold. Names the file and the tensors.
        """
        index = path / INDEX
        if index.is_file():
            return cls(_indexed(path, index))
        files = [path / name for name in ("model.safetensors", "dense.safetensors")]
        files = [file for file in files if file.is_file()][:1] or _numbered(path)
        entries: dict[str, TensorEntry] = {}
        for file in files:
            entries.update(read_header(file))
        return cls(entries)

    @property
    def files(self) -> list[Path]:
        """The weight files, sorted by name."""
        return sorted({entry.file for entry in self._entries.values()})

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(entry.stop - entry.start for entry in self._entries.values())

    def keys(self) -> list[str]:
        """Names of all tensors, sorted."""
        return sorted(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def entry(self, name: str) -> TensorEntry:
        """Where a tensor lies."""
        return self._entries[name]

    def read(self, name: str, index: int | None = None, out: Tensor | None = None) -> Tensor:
        """A tensor in its own dtype, or `tensor[index]` along its first axis, read from disk.

        Args:
            name: Its name on disk.
            index: Which slice of the first axis; None reads all.
            out: Contiguous CPU tensor of that dtype and size to read into; None makes one.

        Raises:
            ModelError: The dtype has no torch type here, or the file shrank since it was opened.
        """
        entry = self._entries[name]
        dtype = DTYPES.get(entry.dtype)
        if dtype is None:
            raise ModelError(f"dtype of `{name}` is not supported: {entry.dtype}", UNQUANTIZED)
        start, size, shape = entry.start, entry.stop - entry.start, entry.shape
        if index is not None:
            size //= shape[0]
            start += index * size
            shape = shape[1:]
        if out is None:
            out = torch.empty(shape, dtype=dtype)
        if out.dtype != dtype or out.nbytes != size or not out.is_contiguous():
            raise ValueError(f"`{name}` does not fit into {out.dtype} {list(out.shape)}")
        self.bytes_read += size
        _read_into(entry.file, start, out.view(-1).view(torch.uint8).numpy().data, name)
        return out


def _read_into(file: Path, start: int, out: memoryview, name: str) -> None:
    """Fill `out` from byte `start` of the file."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        done = 0
        while done < len(out):
            count = os.preadv(descriptor, [out[done:]], start + done)
            if count == 0:
                raise ModelError(f"`{file.name}` ended inside `{name}`", INCOMPLETE)
            done += count
    finally:
        os.close(descriptor)


def _indexed(path: Path, index: Path) -> dict[str, TensorEntry]:
    """Entries of the shards that an index file names, all present."""
    refuse_pointer(index)
    try:
        weight_map = {
            str(k): str(v) for k, v in json.loads(index.read_bytes())["weight_map"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"not a readable shard index: `{index.name}` ({error})", INCOMPLETE
        ) from error
    by_file: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        if Path(file).name != file or not file.isprintable() or len(file) > _MAX_NAME:
            raise ModelError(
                f"shard index names a file outside its folder: {ascii(file)[:200]}",
                "an honest index names files beside it: fetch the checkpoint again",
            )
        by_file.setdefault(file, []).append(name)
    for file, names in sorted(by_file.items()):
        if not (path / file).is_file():
            raise ModelError(
                f"shard is missing: `{file}`, which should hold {some(names)}", INCOMPLETE
            )
    entries: dict[str, TensorEntry] = {}
    for file, names in sorted(by_file.items()):
        header = read_header(path / file)
        absent = [name for name in names if name not in header]
        if absent:
            raise ModelError(f"shard `{file}` does not hold {some(absent)}", INCOMPLETE)
        entries.update(header)
    return entries


def _numbered(path: Path) -> list[Path]:
    """Shards without an index: `name-00001-of-00004.safetensors`, none missing."""
    files = sorted(path.glob("*.safetensors"))
    if not files:
        other = [
            file.name for file in (*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.gguf"))
        ]
        found = f"; found {some(other)}" if other else ""
        raise ModelError(
            f"no safetensors weights in `{path}`{found}",
            "convert the checkpoint with `save_pretrained`: no other format is read",
        )
    for file in files:
        match = re.fullmatch(r"(.+-)(\d+)-of-(\d+)\.safetensors", file.name)
        for number in range(1, int(match[3]) + 1 if match else 1):
            assert match is not None
            wanted = f"{match[1]}{number:0{len(match[2])}d}-of-{match[3]}.safetensors"
            if not (path / wanted).is_file():
                raise ModelError(f"shard is missing: `{wanted}`", INCOMPLETE)
    return files
