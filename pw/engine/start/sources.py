"""What an engine is loaded from: an artifact, or a config alone (`--load-format dummy`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from pw.blocks import MODULES
from pw.config import EngineConfig
from pw.engine.start.dummy import DummySource
from pw.errors import ConfigError, ModelError, StoreError
from pw.memory.host_store import PlaneSource
from pw.models.architecture import Architecture
from pw.models.checkpoint import Checkpoint
from pw.models.dummy import random_experts, random_skeleton
from pw.models.resolve import resolve_model
from pw.models.skeleton import Skeleton, load_skeleton
from pw.models.slicing import DensePart
from pw.store.artifact import Artifact
from pw.store.tables import Table
from pw.store.verify import verify


class WeightSource(PlaneSource, Protocol):
    """Planes, LUTs and tables of measurements of one model."""

    @property
    def path(self) -> Path:
        """Folder."""

    @property
    def model_name(self) -> str:
        """What the model is called."""

    @property
    def artifact_hash(self) -> str:
        """Hex SHA-256 that stands for every byte of it."""

    @property
    def min_bits(self) -> int:
        """Narrowest width."""

    @property
    def max_bits(self) -> int:
        """Widest width."""

    @property
    def lut_dtype(self) -> torch.dtype:
        """Type of LUT entries, bfloat16 or float16."""

    @property
    def table_bytes(self) -> int | None:
        """Bytes after which a LUT says the same again; None: every row has its own table."""

    def has_table(self, stage: str) -> bool:
        """Whether a stage has left its table."""

    def table(self, stage: str) -> Table:
        """Arrays and attributes of a stage."""


@dataclass(frozen=True)
class Loaded:
    """A model read into memory, but for its planes."""

    source: WeightSource
    skeleton: Skeleton
    dense: list[tuple[Tensor, Tensor]] | None  # unquantized experts by MoE layer, policy dense only


def load(
    path: Path,
    config: EngineConfig,
    device: torch.device,
    part_of: Callable[[Architecture], DensePart] | None = None,
) -> Loaded:
    """Read, or with `load_format` dummy make up, what `path` names.

    Args:
        path: The artifact, or a folder with a config.json.
        config: The engine's.
        device: Where the weights go.
        part_of: What to keep of the dense weights, where several ranks share the model. Experts
            are all there in any case.

    Raises:
        StoreError: The artifact is missing or damaged.
        ModelError: The model cannot be served.
        ConfigError: A setting cannot be honoured.
    """
    wants_dense = config.policy.kind == "dense"
    if config.load_format == "dummy":
        if config.planner.residual == "exact" and config.policy.kind == "adaptive":
            raise ConfigError(
                "dummy weights have no column energies for --residual exact",
                "use learned or off",
            )
        dummy = DummySource(path)
        skeleton = random_skeleton(
            dummy.architecture,
            _activation_dtype(config, dummy.lut_dtype, device),
            device,
            part=None if part_of is None else part_of(dummy.architecture),
        )
        dense = random_experts(dummy.geometry, dummy.lut_dtype, device) if wants_dense else None
        return Loaded(dummy, skeleton, dense)
    artifact = _open_artifact(path)
    dtype = _activation_dtype(config, artifact.lut_dtype, device)
    checkpoint = Checkpoint.open(path)
    part = None if part_of is None else part_of(checkpoint.architecture)
    skeleton = load_skeleton(checkpoint, dtype, device, part)
    experts = _load_dense_experts(artifact, config, device) if wants_dense else None
    return Loaded(artifact, skeleton, experts)


def _activation_dtype(
    config: EngineConfig, stored: torch.dtype, device: torch.device
) -> torch.dtype:
    return dtype_of(config.dtype, stored if device.type != "cpu" else torch.float32)


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_of(name: str, automatic: torch.dtype) -> torch.dtype:
    """A dtype by its name in the settings; `auto` is `automatic`."""
    if name == "auto":
        return automatic
    if name not in _DTYPES:
        raise ConfigError(f"unknown dtype: `{name}`", f"use auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _open_artifact(path: Path) -> Artifact:
    """An artifact whose every file but planes and LUTs has been read and compared; those are
    checked as they are loaded.

    Raises:
        StoreError: A byte is not as it was written.
    """
    artifact = Artifact.open(path)
    found = verify(artifact, payload=False)
    if found:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise StoreError(
            f"artifact is damaged: {found[0]}{more}: `{path}`",
            f"`pw inspect --verify {path}` lists all; make it again or copy it again",
        )
    return artifact


def _load_dense_experts(
    artifact: Artifact, config: EngineConfig, device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """Unquantized experts of every MoE layer, in the checkpoint's dtype.

    Raises:
        ConfigError: The checkpoint is gone, or not the one the artifact was made from.
    """
    record = artifact.manifest.model
    source = record.source if config.checkpoint is None else str(config.checkpoint)
    try:
        checkpoint = Checkpoint.open(resolve_model(source))
    except ModelError as error:
        raise ConfigError(
            f"policy dense needs the original checkpoint: {error.message}",
            "name it with --checkpoint",
        ) from error
    if checkpoint.fingerprint() != dict(record.files):
        raise ConfigError(
            f"not the checkpoint that the artifact was made from: `{source}`",
            "name the right one with --checkpoint",
        )
    geometry = artifact.geometry
    layers = []
    for layer in geometry.layers:
        keys = [key for key in geometry.keys() if key.layer == layer]
        pair = [
            torch.stack([checkpoint.expert_weight(key) for key in keys if key.module == module])
            for module in MODULES
        ]
        layers.append((pair[0].to(device), pair[1].to(device)))
    return layers
