"""Writes one safetensors file tensor by tensor, so that memory holds one of them at a time.

The format's own writer takes all tensors at once. The bytes are those that it would write.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Names in the header, in the order in which the format's writer puts the tensors.
_NAMES = {
    torch.int64: "I64", torch.float64: "F64", torch.float32: "F32", torch.int32: "I32",
    torch.bfloat16: "BF16", torch.float16: "F16", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_ORDER = list(_NAMES)


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A tensor that is read when it is its turn to be written."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSource:
        """One that is in memory already."""
        return cls(tensor.dtype, tuple(tensor.shape), lambda: tensor)

    @property
    def nbytes(self) -> int:
        """Its bytes in the file."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def write_tensors(path: Path, sources: Mapping[str, TensorSource]) -> None:
    """Create or truncate a safetensors file and write the tensors into it, then fsync it.

    Raises:
        ValueError: A source gives another tensor than it promised.
        OSError: The disk is full.
    """
    order = sorted(sources, key=lambda name: (_ORDER.index(sources[name].dtype), name))
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o644)
    try:
        _write_all(descriptor, _header({name: sources[name] for name in order}))
        for name in order:
            source = sources[name]
            tensor = source.read()
            if tensor.dtype != source.dtype or tuple(tensor.shape) != source.shape:
                raise ValueError(
                    f"`{name}` is {tensor.dtype} {list(tensor.shape)}, not as promised"
                )
            _write_all(descriptor, tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _header(sources: Mapping[str, TensorSource]) -> bytes:
    """Length and table of contents, padded so that tensors begin at a multiple of 8 bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, source in sources.items():
        stop = start + source.nbytes
        header[name] = {
            "dtype": _NAMES[source.dtype], "shape": source.shape, "data_offsets": (start, stop)
        }  # fmt: skip
        start = stop
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]
