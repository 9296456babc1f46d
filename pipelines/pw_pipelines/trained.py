"""What a distillation trained, whole in one file, before anything of the artifact is written.

A GPU does not train the same codes twice. An artifact that was stopped while it was written goes on
from this file, so that all of its blocks come from one training, and so does its report.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from pw.blocks import MODULES, BlockKey, Module
from pw.errors import StoreError
from pw.store.files import disk_errors, fsync_folder
from pw.store.manifest import canonical_json, plain
from pw.store.tensor_file import TensorSource, write_tensors
from pw.store.writer import ArtifactWriter
from pw_kernels.bitplane import TILE_WORDS, bit_reverse_lut, pack_planes, plane_bytes
from pw_pipelines.latents import Blocks

_IDENTITY, _DIVERGENCE = "identity", "divergence"


@dataclass(frozen=True)
class Distilled:
    """What the training gave, on windows that it did not see; nats a token."""

    before: float
    after: float


class Trained:
    """The file `X.pw.work/trained.safetensors`; gone when the artifact is done.

    Args:
        artifact: Folder of the artifact, present or future.
    """

    def __init__(self, artifact: Path) -> None:
        self.path = artifact.with_name(f"{artifact.name}.work") / "trained.safetensors"
        self._artifact = artifact

    def there(self, inputs: Any) -> bool:
        """Whether a training with these inputs was saved."""
        if not self.path.is_file():
            return False
        with safe_open(self.path, "pt") as saved:
            return bool(torch.equal(saved.get_tensor(_IDENTITY), _identity(inputs)))

    def save(self, inputs: Any, blocks: Blocks, report: Distilled) -> None:
        """Save planes and tables of all blocks; as they were fitted if nothing was gained.

        Raises:
            PartialResultError: Disk full; the training is lost.
        """
        divergence = torch.tensor([report.before, report.after], dtype=torch.float64)
        sources = {
            _IDENTITY: TensorSource.of(_identity(inputs)),
            _DIVERGENCE: TensorSource.of(divergence),
            **_sources(blocks, changed=report.after < report.before),
        }
        scratch = self.path.with_suffix(".new")
        with disk_errors(self.path, sum(source.nbytes for source in sources.values())):
            self.path.parent.mkdir(exist_ok=True)
            write_tensors(scratch, sources)
            os.replace(scratch, self.path)
            fsync_folder(self.path.parent)

    def report(self) -> Distilled:
        """What was saved with the blocks."""
        with safe_open(self.path, "pt") as saved:
            before, after = saved.get_tensor(_DIVERGENCE).tolist()
        return Distilled(before, after)

    def write(self, writer: ArtifactWriter, widths: Sequence[int]) -> None:
        """Write all blocks that are not written yet."""
        geometry = writer.manifest.geometry
        with safe_open(self.path, "pt") as saved:
            for layer in geometry.layers:
                for module in MODULES:
                    if not writer.done(layer, module):
                        planes = saved.get_tensor(_name(layer, module))
                        luts = {b: saved.get_tensor(_name(layer, module, b)) for b in widths}
                        writer.write_blocks(layer, module, planes, luts)

    def refuse_others(self, writer: ArtifactWriter) -> None:
        """Refuse to go on with blocks whose training is not here.

        Raises:
            StoreError: There are such blocks.
        """
        geometry = writer.manifest.geometry
        if any(writer.done(layer, module) for layer in geometry.layers for module in MODULES):
            partial = f"{self._artifact}.partial"
            raise StoreError(
                f"blocks in `{partial}` are of a training that is not in `{self.path}`",
                f"remove `{partial}` and run the same command again",
            )

    def clear(self) -> None:
        """Forget it."""
        for path in (self.path, self.path.with_suffix(".new")):
            path.unlink(missing_ok=True)
        with suppress(OSError):  # another stage saves there, or nothing was saved
            self.path.parent.rmdir()


def _identity(inputs: Any) -> Tensor:
    digest = hashlib.sha256(canonical_json(plain(inputs))).digest()
    return torch.tensor(list(digest), dtype=torch.uint8)


def _name(layer: int, module: Module, bits: int | None = None) -> str:
    return f"{layer}.{module}.{'planes' if bits is None else bits}"


def _sources(blocks: Blocks, *, changed: bool) -> Mapping[str, TensorSource]:
    """Planes [E, B, tiles, 128] and LUTs [E, N, 2^bits] in kernel order, made one at a time."""
    fitted, found = blocks.artifact, {}
    geometry, most = fitted.geometry, fitted.max_bits

    def planes(keys: list[BlockKey]) -> Tensor:
        return pack_planes(
            torch.stack([blocks.codes(key, changed=changed).cpu() for key in keys]), most
        )

    def luts(keys: list[BlockKey], bits: int) -> Tensor:
        tables = torch.stack([blocks.lut(key, bits, changed=changed).cpu() for key in keys])
        return bit_reverse_lut(tables.to(fitted.lut_dtype))

    for layer in geometry.layers:
        for module in MODULES:
            shape = geometry.shape(module)
            keys = [BlockKey(layer, expert, module) for expert in range(geometry.experts)]
            tiles = plane_bytes(shape.rows, shape.cols) // (4 * TILE_WORDS)
            size = (geometry.experts, most, tiles, TILE_WORDS)
            found[_name(layer, module)] = TensorSource(torch.int32, size, partial(planes, keys))
            for bits in fitted.manifest.widths:
                found[_name(layer, module, bits)] = TensorSource(
                    fitted.lut_dtype, (geometry.experts, shape.rows, 1 << bits),
                    partial(luts, keys, bits),
                )  # fmt: skip
    return found
