"""Writes a Hugging Face checkpoint file by file, under the names that transformers saves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from pw.models.shards import INDEX
from pw.store.files import disk_errors
from pw.store.tensor_file import TensorSource, write_tensors


class ShardWriter:
    """Writes numbered safetensors files and their index.

    Args:
        folder: Where; it exists.
        shards: Number of files that will be written.
        bytes_needed: Of all, for the message when the disk is full.
    """

    def __init__(self, folder: Path, shards: int, bytes_needed: int) -> None:
        self.shards, self.bytes = shards, 0
        self.places: dict[str, str] = {}  # tensor -> file
        self._folder, self._needed, self._written = folder, bytes_needed, 0

    def write(self, tensors: Mapping[str, Tensor | TensorSource]) -> None:
        """Write the next file; sources are read one at a time."""
        self._written += 1
        name = f"model-{self._written:05d}-of-{self.shards:05d}.safetensors"
        sources = {
            key: tensor if isinstance(tensor, TensorSource) else TensorSource.of(tensor)
            for key, tensor in tensors.items()
        }
        with disk_errors(self._folder, self._needed):
            write_tensors(self._folder / name, sources)
        self.places.update(dict.fromkeys(tensors, name))
        self.bytes += sum(source.nbytes for source in sources.values())

    def write_index(self) -> None:
        """Write which tensor is in which file."""
        index = {"metadata": {"total_size": self.bytes}, "weight_map": self.places}
        (self._folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def original_names(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a model's module tree in the architecture's layout on disk."""
    found: dict[str, Tensor] = revert_weight_conversion(model, tensors)
    return found
