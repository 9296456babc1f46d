"""The header of one safetensors file, from a stranger: right to the last byte, or refused.

The rules are those of the format's own reader: offsets of all tensors follow each other without
hole or overlap from the header to the end of the file, so that a header promises nothing that the
file does not hold. Names that come twice (readers differ in which one they take) or that no
terminal could show are refused too.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pw.errors import ModelError
from pw.models.pointers import refuse_pointer

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
INCOMPLETE = "fetch the checkpoint again: it is incomplete"
UNQUANTIZED = "name the unquantized checkpoint that it was made from: float32, float16 or bfloat16"
_MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors format
_DTYPE = re.compile(r"BOOL|[A-Z]{1,2}([1-9][0-9]{0,2})(?:_[A-Z0-9]{1,8})?")  # its bits
_MAX_AXES = 64
_MAX_NAME = 4096  # characters
_FIELDS = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies."""

    file: Path
    dtype: str  # as in the header, e.g. "BF16"
    shape: tuple[int, ...]
    start: int  # byte offset in the file
    stop: int


def some(names: Iterable[str], count: int = 3) -> str:
    """The first few names in backticks and how many more there are."""
    listed = sorted(names)
    more = f" and {len(listed) - count} more" if len(listed) > count else ""
    return ", ".join(f"`{name}`" for name in listed[:count]) + more


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Entries of one safetensors file, checked against each other and against its size.

    Raises:
        ModelError: The file is not safetensors, or is shorter than its header promises.
    """
    refuse_pointer(file)
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(_MAX_HEADER, size - 8):
                raise ValueError(f"header of {length} bytes")
            entries = _parsed(stream.read(length), file, 8 + length)
    except (struct.error, ValueError, RecursionError) as error:
        raise ModelError(
            f"not a readable safetensors file: `{file.name}` ({str(error)[:200]})", INCOMPLETE
        ) from error
    cut = [name for name, entry in entries.items() if entry.stop > size]
    if cut:
        promised = max(entries[name].stop for name in cut)
        raise ModelError(
            f"shard is truncated: `{file.name}` has {size} of {promised} bytes, "
            f"which cuts off {some(cut)}",
            INCOMPLETE,
        )
    for name, entry in entries.items():
        _check_size(name, entry)
    _check_order(file, entries, 8 + length, size)
    return entries


def _parsed(data: bytes, file: Path, base: int) -> dict[str, TensorEntry]:
    """Entries as the header has them, of the right types; `base` is where offsets count from.

    Raises:
        ValueError: The header is no JSON object of tensors.
    """
    if not data.startswith(b"{"):
        raise ValueError("header is no JSON object")
    header = json.loads(data, object_pairs_hook=_unique)
    metadata = header.pop("__metadata__", {})
    if not _is_table(metadata, str):
        raise ValueError("`__metadata__` must map strings to strings")
    return {name: _entry(name, item, file, base) for name, item in header.items()}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name appears twice")
    return found


def _is_table(value: Any, kind: type) -> bool:
    return isinstance(value, dict) and all(isinstance(item, kind) for item in value.values())


def _is_sizes(value: Any) -> bool:
    """Whether this is a list of integers that a file can have."""
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in value)


def _entry(name: str, item: Any, file: Path, base: int) -> TensorEntry:
    if not name.isprintable() or len(name) > _MAX_NAME:
        raise ValueError(f"a name is not plain text: {name[:80]!a}")
    if not isinstance(item, dict) or set(item) != _FIELDS:
        raise ValueError(f"`{name[:80]}` must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = item["dtype"], item["shape"], item["data_offsets"]
    right = isinstance(dtype, str) and _is_sizes(shape) and len(shape) <= _MAX_AXES
    if not right or not _is_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"`{name[:80]}` must have a text, sizes and two offsets")
    return TensorEntry(file, dtype, tuple(shape), base + offsets[0], base + offsets[1])


def _check_size(name: str, entry: TensorEntry) -> None:
    """Refuse a header whose byte range contradicts dtype and shape, or has another dtype's name."""
    named = _DTYPE.fullmatch(entry.dtype)
    bits = int(named[1] or 8) if named else 0
    size = entry.stop - entry.start
    if bits == 0 or size < 0 or 8 * size != bits * math.prod(entry.shape):
        raise ModelError(
            f"header of `{entry.file.name}` contradicts itself at `{name}`: {entry.dtype[:16]!a} "
            f"{list(entry.shape)} in {size} bytes",
            INCOMPLETE,
        )


def _check_order(file: Path, entries: dict[str, TensorEntry], base: int, size: int) -> None:
    """Refuse holes, overlaps and bytes that belong to nobody."""
    end = base
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != end:
            raise ModelError(
                f"header of `{file.name}` leaves a hole or an overlap before `{name}`: it begins "
                f"at byte {entry.start}, what is before it ends at {end}",
                INCOMPLETE,
            )
        end = entry.stop
    if end != size:
        raise ModelError(f"`{file.name}` has {size} bytes, its header describes {end}", INCOMPLETE)
