"""A Hugging Face checkpoint, or the dense part of an artifact: what it holds, read piece by piece.

Opening reads config and headers only. Expert weights come in one orientation whatever the layout
on disk: [N rows = outputs, K columns = inputs], gate rows before up rows.
"""

from __future__ import annotations

import hashlib
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pw.blocks import BlockKey, ExpertGeometry, Module
from pw.errors import ModelError
from pw.models.architecture import Architecture
from pw.models.experts import gate_first
from pw.models.geometry import KvGeometry
from pw.models.header import DTYPES, UNQUANTIZED, some
from pw.models.keymap import KeyMap, map_keys
from pw.models.shards import ShardIndex

_FLOATS = ("F32", "F16", "BF16")
_PACKED = (".qweight", ".weight_packed")  # of GPTQ, AWQ and compressed-tensors
_OTHER_MODEL = "weights and config.json are of different models: fetch both again"
_DIGESTS_AT_ONCE = 8


class Checkpoint:
    """An opened checkpoint. Make it with `Checkpoint.open`."""

    def __init__(self, path: Path, shards: ShardIndex, architecture: Architecture) -> None:
        self.path = path
        self.shards = shards
        self.architecture = architecture
        self.keymap: KeyMap = map_keys(architecture, shards.keys())
        self._modules = {
            layer: architecture.meta.get_submodule(name)
            for name, layer in architecture.experts.items()
        }

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Open a checkpoint folder, or an artifact folder (dense tensors only).

        Raises:
            ModelError: Missing, truncated or renamed shards; tensors of the model that no shard
                holds; experts missing or of another shape; a model that is not supported. All
                found without reading a tensor.
        """
        shards = ShardIndex.open(path)
        architecture = Architecture.load(path)
        packed = [name for name in shards.keys() if name.endswith(_PACKED)]
        if packed:
            raise ModelError(f"its weights are already quantized: {some(packed)}", UNQUANTIZED)
        checkpoint = cls(path, shards, architecture)
        checkpoint._audit_dense()
        if checkpoint.has_experts:
            checkpoint._audit_experts()
        return checkpoint

    @property
    def geometry(self) -> ExpertGeometry:
        """Layers, counts and shapes of the routed experts."""
        return self.architecture.geometry

    @property
    def kv(self) -> KvGeometry:
        """Keys and values of each attention layer."""
        return self.architecture.probe.kv

    @property
    def has_experts(self) -> bool:
        """Whether routed experts are stored here; False for an artifact folder."""
        return bool(self.keymap.fused or self.keymap.single)

    @property
    def weight_dtype(self) -> torch.dtype:
        """Dtype of the routed experts (of the largest dense tensor where there are none)."""
        if self.has_experts:
            return DTYPES[self.shards.entry(self._pieces(next(self.geometry.keys()))[0]).dtype]
        entries = [self.shards.entry(name) for name in self.keymap.dense]
        largest = max(entries, key=lambda entry: entry.stop - entry.start)
        return DTYPES[largest.dtype]

    def dense_keys(self) -> list[str]:
        """Names on disk of all tensors of the text model that are not routed expert weights."""
        return sorted(self.keymap.dense)

    def dense_weights_in_layers(self) -> int:
        """Number of weights in the decoder layers that are not routed experts."""
        names = (name for name, target in self.keymap.dense.items() if ".layers." in target)
        return sum(math.prod(self.shards.entry(name).shape) for name in names)

    def read(self, name: str) -> Tensor:
        """A tensor by its name on disk, in its own dtype."""
        return self.shards.read(name)

    def expert_weight(self, key: BlockKey) -> Tensor:
        """Weight [N, K] of a block in the checkpoint's dtype."""
        fused = self.keymap.fused.get((key.layer, key.module))
        if fused is None:
            return self._read_pieces(key)
        module = self._modules[key.layer]
        weight = self.shards.read(fused, key.expert)
        if module.is_transposed:
            weight = weight.T
        return (gate_first(weight, module) if key.module == "gate_up" else weight).contiguous()

    def expert_bias(self, key: BlockKey) -> Tensor | None:
        """Bias [N] of a block, rows as in `expert_weight`; None where the model has none."""
        name = self.keymap.biases.get((key.layer, key.module))
        if name is None:
            return None
        bias = self.shards.read(name, key.expert)
        return gate_first(bias, self._modules[key.layer]) if key.module == "gate_up" else bias

    def fingerprint(self) -> dict[str, str]:
        """Hex sha256 of the config and of every weight file, by file name."""
        files = [self.path / "config.json", *self.shards.files]
        with ThreadPoolExecutor(_DIGESTS_AT_ONCE) as pool:  # a core makes some 1.5 GB/s
            digests = list(pool.map(_sha256, files))
        self.shards.bytes_read += sum(file.stat().st_size for file in files)
        return {file.name: digest for file, digest in zip(files, digests, strict=True)}

    def _read_pieces(self, key: BlockKey) -> Tensor:
        """A block that is stored as one tensor per projection, each read into its rows."""
        names = self._pieces(key)
        shape = self.geometry.shape(key.module)
        dtype = DTYPES[self.shards.entry(names[0]).dtype]
        weight = torch.empty(shape.rows, shape.cols, dtype=dtype)
        for name, rows in zip(names, weight.chunk(len(names)), strict=True):
            self.shards.read(name, out=rows)
        return weight

    def _pieces(self, key: BlockKey) -> list[str]:
        """Names on disk that make up a block, in row order."""
        fused = self.keymap.fused.get((key.layer, key.module))
        if fused is not None:
            return [fused]
        pieces = self.keymap.single.get((key.layer, key.expert, key.module), {})
        return [pieces[rank] for rank in sorted(pieces)]

    def _audit_dense(self) -> None:
        """Every tensor of the model but the experts is on disk with the model's shape."""
        model: Any = self.architecture.meta
        tied = set(model.all_tied_weights_keys)
        state = model.state_dict()
        weights = {f"{path}.{leaf}" for path in self.architecture.experts for leaf in _BLOCK_LEAVES}
        held = set(self.keymap.dense.values())
        missing = set(state) - held - weights - tied
        if missing:
            raise ModelError(
                f"checkpoint lacks {len(missing)} tensors of the model: {some(missing)}",
                "fetch the checkpoint again: it is incomplete",
            )
        for name, target in self.keymap.dense.items():
            shape = self.shards.entry(name).shape
            if shape != tuple(state[target].shape):
                raise ModelError(
                    f"shape of `{name}` is {list(shape)}, expected {list(state[target].shape)}",
                    _OTHER_MODEL,
                )

    def _audit_experts(self) -> None:
        """All expert blocks are on disk, once, in a float dtype and with the model's shape."""
        keys = self.geometry.keys()
        missing = [str(key) for key in keys if not self._complete(key)]
        if missing:
            expected = self.geometry.blocks
            raise ModelError(
                f"expected {expected} expert blocks, found {expected - len(missing)}: "
                f"missing {some(missing)}",
                "fetch the checkpoint again: it is incomplete",
            )

        single = (name for pieces in self.keymap.single.values() for name in pieces.values())
        names = (*self.keymap.fused.values(), *single)
        dtypes = {self.shards.entry(name).dtype: name for name in names}
        if len(dtypes) > 1:
            listed = ", ".join(f"{dtype} (`{name}`)" for dtype, name in sorted(dtypes.items()))
            raise ModelError(
                f"expert weights differ in dtype: {listed}",
                "save the checkpoint in one dtype, with `save_pretrained`",
            )

    def _complete(self, key: BlockKey) -> bool:
        """Whether the pieces of a block are there; refuses a wrong shape or dtype."""
        names = self._pieces(key)
        shape = self.geometry.shape(key.module)
        wanted: tuple[int, ...] = (shape.rows, shape.cols)
        if (key.layer, key.module) in self.keymap.fused:
            wanted = tuple(getattr(self._modules[key.layer], _LEAF[key.module]).shape)
        elif key.module == "gate_up":
            wanted = (shape.rows // 2, shape.cols)
            if len(names) != 2:
                return False
        for name in names:
            entry = self.shards.entry(name)
            if entry.shape != wanted or entry.dtype not in _FLOATS:
                raise ModelError(
                    f"expert tensor `{name}` is {entry.dtype} {list(entry.shape)}, "
                    f"expected {list(wanted)} in {', '.join(_FLOATS)}",
                    _OTHER_MODEL if entry.dtype in _FLOATS else UNQUANTIZED,
                )
        return bool(names)


_LEAF: dict[Module, str] = {"gate_up": "gate_up_proj", "down": "down_proj"}
_BLOCK_LEAVES = tuple(_LEAF.values())


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
