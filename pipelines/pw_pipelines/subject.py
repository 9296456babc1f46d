"""What a plan is made for: a model by its shapes, from a checkpoint's headers or a config alone."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pw.blocks import ExpertGeometry
from pw.errors import ModelError
from pw.models.architecture import Architecture
from pw.models.checkpoint import Checkpoint

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_EXPERTS = ("gate_up_proj", "down_proj")  # weights of an experts module


@dataclass(frozen=True)
class Subject:
    """Shapes and bytes of a model. Names are those on disk, or of the model without a checkpoint.

    Attributes:
        architecture: Its definition.
        dtype: Of the routed experts.
        copied: Bytes of each tensor that is not quantized.
        ignored: Bytes of each tensor that is no part of the text model.
        head: Bytes of the output matrix; 0 where it is the embedding.
        layer_weights: Weights in decoder layers that are not routed experts.
    """

    architecture: Architecture
    dtype: torch.dtype
    copied: Mapping[str, int]
    ignored: Mapping[str, int]
    head: int
    layer_weights: int

    @classmethod
    def of_checkpoint(cls, checkpoint: Checkpoint) -> Subject:
        """From the headers of an opened checkpoint."""

        def sizes(names: Iterable[str]) -> dict[str, int]:
            entries = {name: checkpoint.shards.entry(name) for name in names}
            return {name: entry.stop - entry.start for name, entry in entries.items()}

        targets = checkpoint.keymap.dense.items()
        return cls(
            checkpoint.architecture,
            checkpoint.weight_dtype,
            sizes(checkpoint.dense_keys()),
            sizes(checkpoint.keymap.ignored),
            sum(sizes(name for name, target in targets if "lm_head" in target).values()),
            checkpoint.dense_weights_in_layers(),
        )

    @classmethod
    def of_config(cls, file: Path) -> Subject:
        """From a config.json, in the dtype that it states, else in bfloat16.

        Raises:
            ModelError: No readable config, or a model that cannot be served.
        """
        with tempfile.TemporaryDirectory() as folder:
            try:
                shutil.copyfile(file, Path(folder) / "config.json")
            except OSError as error:
                raise ModelError(f"cannot read config: `{file}`: {error.strerror}") from error
            architecture = Architecture.load(Path(folder))
        dtype = _stated_dtype(file)
        model: Any = architecture.meta
        left_out = {f"{path}.{leaf}" for path in architecture.experts for leaf in _EXPERTS}
        left_out |= set(model.all_tied_weights_keys)
        weights = {
            name: tensor.numel()
            for name, tensor in model.state_dict().items()
            if name not in left_out
        }
        copied = {name: count * dtype.itemsize for name, count in weights.items()}
        return cls(
            architecture,
            dtype,
            copied,
            {},
            copied.get("lm_head.weight", 0),
            sum(count for name, count in weights.items() if ".layers." in name),
        )

    @property
    def geometry(self) -> ExpertGeometry:
        """Of the routed experts."""
        return self.architecture.geometry

    def dense_weights_in_layers(self) -> int:
        """Number of weights in the decoder layers that are not routed experts."""
        return self.layer_weights

    @property
    def layers(self) -> int:
        """Decoder layers, dense ones included."""
        return int(self.architecture.config.num_hidden_layers)

    @property
    def hidden(self) -> int:
        """Width of the hidden states."""
        return int(self.architecture.config.hidden_size)

    @property
    def copied_bytes(self) -> int:
        """Of everything that is not quantized."""
        return sum(self.copied.values())

    @property
    def copied_bytes_in_layers(self) -> int:
        """Of what is not quantized in decoder layers."""
        return sum(size for name, size in self.copied.items() if re.search(r"\.\d+\.", name))

    @property
    def text_bytes(self) -> int:
        """Of the whole text model, routed experts included."""
        return self.geometry.weights * self.dtype.itemsize + self.copied_bytes


def _stated_dtype(file: Path) -> torch.dtype:
    settings: dict[str, Any] = json.loads(file.read_bytes())
    text = settings.get("text_config") or settings
    names = (text.get("dtype"), text.get("torch_dtype"), settings.get("dtype"))
    return next((_DTYPES[name] for name in names if name in _DTYPES), torch.bfloat16)
