"""An artifact back to a Hugging Face checkpoint, its experts at one width, for any peer to check.

Names and layout are those in which transformers saves the architecture; weights are the very
numbers that the engine computes with. One shard per layer of experts, written one at a time.

Axes: E experts, N rows, K columns.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pw.blocks import MODULES, BlockKey
from pw.errors import ConfigError, PartialResultError, StoreError
from pw.models.checkpoint import Checkpoint
from pw.models.dequantized import DequantizedBlocks
from pw.models.experts import expert_modules, to_module_layout
from pw.store.artifact import Artifact
from pw.store.files import disk_full, remove_tree
from pw.store.tensor_file import TensorSource
from pw.store.writer import MODEL_FILES
from pw_pipelines.progress import Progress
from pw_pipelines.quantize import dense_sources
from pw_pipelines.shard_writer import ShardWriter, original_names


@dataclass(frozen=True)
class ExportReport:
    """What `export` wrote."""

    path: Path
    bits: int
    architecture: str  # class of transformers that loads it
    tensors: int
    bytes: int  # of all tensors
    files: int  # with weights


def run(path: str | Path, out: str | Path, bits: int, progress: Progress) -> ExportReport:
    """Write the artifact at `path` as a checkpoint with experts of `bits` bits, into `out`.

    The text model of a multimodal checkpoint is written alone: an artifact holds nothing else.

    Raises:
        ConfigError: The artifact does not have this width.
        StoreError: `out` exists, or the artifact is damaged.
        PartialResultError: The disk is full; nothing is left.
    """
    artifact, out = Artifact.open(path), Path(out)
    if bits not in artifact.manifest.widths:
        raise ConfigError(
            f"width is not in the artifact: {bits}",
            f"it has {artifact.min_bits} to {artifact.max_bits}: `{artifact.path}`",
        )
    if out.exists():
        raise StoreError(f"output exists: `{out}`", "remove it first, or name another folder")
    checkpoint = Checkpoint.open(artifact.path)
    partial = out.with_name(f"{out.name}.partial")
    remove_tree(partial)
    partial.mkdir(parents=True)
    try:
        writer = _write(artifact, checkpoint, partial, bits, progress)
        partial.rename(out)
    except BaseException as error:
        remove_tree(partial)
        if isinstance(error, PartialResultError):
            error.hint = "free some space and run the same command again: it starts anew"
        raise
    return ExportReport(
        path=out,
        bits=bits,
        architecture=type(checkpoint.architecture.meta).__name__,
        tensors=len(writer.places),
        bytes=writer.bytes,
        files=writer.shards,
    )


def _write(
    artifact: Artifact, checkpoint: Checkpoint, folder: Path, bits: int, progress: Progress
) -> ShardWriter:
    """Write all files of a checkpoint into a folder."""
    geometry, needed = artifact.geometry, _bytes_needed(checkpoint)
    if shutil.disk_usage(folder).free < needed:
        raise disk_full(folder, needed)
    writer = ShardWriter(folder, len(geometry.layers) + 1, needed)
    writer.write(_dense(checkpoint))
    blocks = DequantizedBlocks(artifact, torch.device("cpu"))
    with progress.stage("export", geometry.blocks, "blocks") as advance:
        for slot, layer in enumerate(geometry.layers):
            writer.write(_experts(checkpoint, blocks, slot, layer, bits, artifact.lut_dtype))
            advance(geometry.experts * len(MODULES))
    writer.write_index()
    _write_config(checkpoint, folder)
    return writer


def _bytes_needed(checkpoint: Checkpoint) -> int:
    entries = [checkpoint.shards.entry(name) for name in checkpoint.dense_keys()]
    return sum(e.stop - e.start for e in entries) + 2 * checkpoint.geometry.weights


def _dense(checkpoint: Checkpoint) -> dict[str, TensorSource]:
    """Everything but expert weights, byte for byte; under the text model's own names."""
    sources = dense_sources(checkpoint)
    if not checkpoint.architecture.multimodal:
        return sources
    targets = {checkpoint.keymap.dense[name]: source for name, source in sources.items()}
    found = {}
    for target, source in targets.items():  # these are renamed, one by one, and nothing else
        stand_in = torch.empty(source.shape, dtype=source.dtype, device="meta")
        (name,) = original_names(checkpoint.architecture.meta, {target: stand_in})
        found[name] = source
    return found


def _experts(
    checkpoint: Checkpoint,
    blocks: DequantizedBlocks,
    slot: int,
    layer: int,
    bits: int,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Expert weights of a layer in the architecture's layout on disk."""
    path, module = expert_modules(checkpoint.architecture.meta)[slot]
    tables: dict[str, Tensor] = {}
    for block in MODULES:
        experts = range(checkpoint.geometry.experts)
        weights = [blocks.weight(BlockKey(layer, e, block), bits).to(dtype) for e in experts]
        tables[f"{path}.{block}_proj"] = to_module_layout(torch.stack(weights), module, block)
    return original_names(checkpoint.architecture.meta, tables)


def _write_config(checkpoint: Checkpoint, folder: Path) -> None:
    """Configuration and tokenizer files; for a part of a multimodal model, the part's config."""
    for name in MODEL_FILES:
        if (checkpoint.path / name).is_file():
            shutil.copyfile(checkpoint.path / name, folder / name)
    if checkpoint.architecture.multimodal:
        meta: Any = checkpoint.architecture.meta
        config = json.loads(checkpoint.architecture.config.to_json_string(use_diff=False))
        config["architectures"] = [type(meta).__name__]
        for key in [key for key in config if key.startswith("_")]:
            del config[key]
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
