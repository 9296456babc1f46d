"""A small artifact that exercises every part of the format, always the same bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pw.blocks import MODULES, BlockShape, ExpertGeometry, Module
from pw.store import Artifact, ArtifactWriter, ModelRecord
from pw.store.tensor_file import TensorSource
from pw_kernels.bitplane import pack_planes

# Layer 0 is dense; rows and columns that are no multiples of a tile; more than one tile.
GEOMETRY = ExpertGeometry((1, 2), 3, 2, BlockShape(40, 130), BlockShape(37, 20))
MIN_BITS, MAX_BITS = 2, 4
WIDTHS = range(MIN_BITS, MAX_BITS + 1)
MODEL = ModelRecord("sample", "models/sample", "", "SampleMoe", {"model.safetensors": "0" * 64})
SETTINGS = {"min_bits": 2, "calibration": {"dataset": "bundled", "nsamples": 4}}


class Sample:
    """Codes, tables and files of the sample, made from a seed."""

    def __init__(self, folder: Path) -> None:
        generator = torch.Generator().manual_seed(0)
        experts = GEOMETRY.experts
        self.source = folder / "checkpoint"
        self.source.mkdir(exist_ok=True)
        (self.source / "config.json").write_text('{"model_type": "sample"}')
        (self.source / "tokenizer.json").write_text("{}")
        self.codes: dict[tuple[int, Module], Tensor] = {}
        self.luts: dict[tuple[int, Module], dict[int, Tensor]] = {}
        for layer in GEOMETRY.layers:
            for module in MODULES:
                shape = GEOMETRY.shape(module)
                size = (experts, shape.rows, shape.cols)
                codes = torch.randint(0, 16, size, dtype=torch.uint8, generator=generator)
                codes[0] = 0  # an all-zero chunk must be stored like any other
                self.codes[layer, module] = codes
                self.luts[layer, module] = {
                    bits: torch.randn(
                        experts, shape.rows, 1 << bits, generator=generator
                    ).bfloat16()
                    for bits in WIDTHS
                }
        self.dense = {
            "model.norm.weight": torch.randn(16, generator=generator).bfloat16(),
            "lm_head.weight": torch.randn(8, 16, generator=generator),
        }
        self.moments: dict[str, NDArray[Any]] = {
            "coverage": np.array([[2, 2, 1], [0, 2, 2]], np.uint8),
            "gate_up": np.zeros((2, 3, 130), np.float32),
            "dropped": np.array(7),
            "none": np.zeros((0, 3), np.float64),
        }

    def open(self, path: Path, overwrite: bool = False, **changes: Any) -> ArtifactWriter:
        """A writer with the sample's settings, or with some changed."""
        asked: dict[str, Any] = {
            "model": MODEL,
            "geometry": GEOMETRY,
            "min_bits": MIN_BITS,
            "max_bits": MAX_BITS,
            "lut_dtype": torch.bfloat16,
            "settings": SETTINGS,
            **changes,
        }
        return ArtifactWriter.open(path, **asked, overwrite=overwrite)

    def write_blocks(self, writer: ArtifactWriter, layer: int, module: Module) -> None:
        """One (layer, module) of the sample."""
        planes = pack_planes(self.codes[layer, module], MAX_BITS)
        writer.write_blocks(layer, module, planes, self.luts[layer, module])

    def dense_sources(self) -> dict[str, TensorSource]:
        """The dense tensors, as the writer takes them."""
        return {name: TensorSource.of(tensor) for name, tensor in self.dense.items()}

    def build(self, path: Path, overwrite: bool = False) -> Artifact:
        """Everything, skipping what is done, with one table before and one after publishing."""
        with self.open(path, overwrite) as writer:
            if not writer.table_done("moments", {"nsamples": 4}, {}):
                report = {"skipped": float("nan")}
                writer.write_table(
                    "moments", self.moments, {"unit": "x^2"}, {"nsamples": 4}, {}, report
                )
            for layer in GEOMETRY.layers:
                for module in MODULES:
                    if not writer.done(layer, module):
                        self.write_blocks(writer, layer, module)
            writer.write_dense(self.dense_sources())
            writer.copy_files(self.source)
            artifact = writer.publish({"blocks": GEOMETRY.blocks})
        write_routing(artifact)
        return artifact


def write_routing(artifact: Artifact, mass: float = 0.5, **how: Any) -> None:
    """The table `routing` of the sample, made from the quantized blocks."""
    artifact.write_table(
        "routing",
        {"mass": np.full((2, 3), mass, np.float32)},
        {"prompts": ["a", "b"]},
        how.pop("settings", {"seed": 0}),
        artifact.digests("quantize"),
        {},
        **how,
    )


def tree_hash(folder: Path) -> str:
    """Hex digest of the names and bytes of every file below a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if not path.is_dir():
            name = path.relative_to(folder).as_posix()
            digest.update(f"{name}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def files_of(folder: Path) -> Mapping[str, Path]:
    """Every file below a folder by relative name."""
    return {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if not path.is_dir()
    }
