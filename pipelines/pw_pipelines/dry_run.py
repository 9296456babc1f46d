"""What `quantize` would do, from headers alone: plan, sizes, memory, disk, time, and refusals.

Reads no weight. Whatever can be known to fail later fails here, with the error it would end in.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

import pw
from pw.blocks import MODULES, ExpertGeometry, Module
from pw.config import WIDTHS, QuantizeConfig, format_bytes
from pw.errors import ConfigError, StoreError
from pw.models.checkpoint import Checkpoint
from pw.models.resolve import resolve_model
from pw.models.tokenizer import load_tokenizer
from pw.store.artifact import QUANTIZE, Artifact
from pw.store.files import disk_full, existing_parent
from pw.store.manifest import MANIFEST, Manifest, StageRecord, plain
from pw.store.publish import refuse_other
from pw_kernels.bitplane import TILE_COLS, lut_bytes, padded_rows, plane_bytes
from pw_pipelines.activations import MEMORY_BYTES
from pw_pipelines.calibration import CalibrationSet, calibration_set
from pw_pipelines.codebook import fit_codebook
from pw_pipelines.quantize import auto_max_bits, quantize_settings, uniform_bytes
from pw_pipelines.ranks import usable_device
from pw_pipelines.rates import seconds_per_operation, timed
from pw_pipelines.refit import refit, refit_bytes
from pw_pipelines.source import vocabulary_of

_WEIGHTS_TIMED = {"cpu": 1 << 17, "cuda": 1 << 24}  # in the short measurement
_PROCESS_BYTES = 600_000_000  # interpreter, torch and transformers


@dataclass(frozen=True)
class BlockPlan:
    """What becomes of the blocks of one module."""

    count: int
    rows: int
    cols: int
    padded: tuple[int, int]  # rows and columns in whole tiles
    bytes_by_width: dict[int, int]  # of one block, planes and LUT


@dataclass(frozen=True)
class TensorGroup:
    """Tensors whose names differ in numbers only."""

    name: str  # numbers replaced by `*`
    count: int
    bytes: int


@dataclass(frozen=True)
class DryRunReport:
    """What `quantize` would do."""

    model: str
    architecture: str
    output: Path
    blocks: int
    plan: dict[Module, BlockPlan]
    min_bits: int
    max_bits: int
    lut_dtype: str
    dense_bytes: int  # of the routed experts in the checkpoint
    bytes_by_width: dict[int, int]  # planes and LUT of all blocks
    left_alone: tuple[TensorGroup, ...]  # copied byte for byte
    not_copied: tuple[TensorGroup, ...]  # no part of the text model
    samples: int
    tokens: int
    memory_bytes: int  # peak, estimated
    disk_bytes: int  # of the artifact and, while it is made, hidden states
    disk_free: int
    read_bytes: int  # from the checkpoint
    seconds: dict[str, float]  # by stage, estimated from a short measurement on this machine


def run(
    model: str,
    out: str | Path,
    config: QuantizeConfig,
    *,
    overwrite: bool = False,
    device: str = "auto",
) -> DryRunReport:
    """Plan what `quantize.run` with the same arguments would do.

    Raises:
        PwError: What `quantize.run` would raise, as far as it does not depend on weights.
    """
    path, out = resolve_model(model), Path(out)
    checkpoint = Checkpoint.open(path)
    samples = calibration_set(config.calibration, load_tokenizer(path), vocabulary_of(checkpoint))
    geometry, itemsize = checkpoint.geometry, checkpoint.weight_dtype.itemsize
    max_bits = config.max_bits or auto_max_bits(geometry, config.min_bits, itemsize)
    widths = [b for b in WIDTHS if config.min_bits <= b <= max_bits]
    _check_output(out, checkpoint, samples, config, max_bits, overwrite)
    needs = _Needs(
        checkpoint, samples, widths, config.codebook, torch.device(usable_device(device))
    )
    free = _check_room(out, needs)
    dtype = str(checkpoint.weight_dtype).removeprefix("torch.")
    return DryRunReport(
        model=model,
        architecture=checkpoint.architecture.name,
        output=out,
        blocks=geometry.blocks,
        plan={module: _block_plan(geometry, module, widths) for module in MODULES},
        min_bits=config.min_bits,
        max_bits=max_bits,
        lut_dtype="float16, or bfloat16 if a weight needs it" if dtype == "float32" else dtype,
        dense_bytes=geometry.weights * itemsize,
        bytes_by_width={b: uniform_bytes(geometry, b) for b in widths},
        left_alone=_groups(checkpoint, checkpoint.dense_keys()),
        not_copied=_groups(checkpoint, checkpoint.keymap.ignored),
        samples=samples.windows.shape[0],
        tokens=samples.windows.numel(),
        memory_bytes=needs.memory_bytes(),
        disk_bytes=needs.disk_bytes(),
        disk_free=free,
        read_bytes=needs.read_bytes(),
        seconds=needs.seconds(),
    )


class _Needs:
    """What the stages need, from shapes and a short measurement."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        samples: CalibrationSet,
        widths: list[int],
        codebook: str,
        device: torch.device,
    ) -> None:
        self._checkpoint, self._geometry = checkpoint, checkpoint.geometry
        self._widths, self._device = widths, device
        self._joint = codebook == "joint"
        self._tokens = samples.windows.numel()
        self._itemsize = checkpoint.weight_dtype.itemsize
        self._run_itemsize = 4 if device.type == "cpu" else self._itemsize
        config = checkpoint.architecture.config
        self._layers = int(config.num_hidden_layers)
        # A layer's inputs and outputs, kept apart so that a stop between them is harmless.
        self._states = 2 * self._tokens * int(config.hidden_size) * self._run_itemsize
        self._dense = sum(g.bytes for g in _groups(checkpoint, checkpoint.dense_keys()))

    def disk_bytes(self) -> int:
        """The artifact without its tables (small), and hidden states too many for memory."""
        luts = sum(uniform_bytes(self._geometry, b) - self._planes(b) for b in self._widths)
        scratch = self._states if self._states > MEMORY_BYTES else 0
        return self._planes(self._widths[-1]) + luts + self._dense + scratch

    def memory_bytes(self) -> int:
        """Peak over calibration, fit and the copy of the dense weights; on the host or the GPU."""
        geometry, wide = self._geometry, self._run_itemsize / self._itemsize
        experts = geometry.weights // len(geometry.layers)
        layer_dense = self._in_layers() // self._layers * wide
        outer = (self._dense - self._in_layers() - self._head_bytes()) * wide
        reading = outer + layer_dense + experts * self._itemsize + min(self._states, MEMORY_BYTES)
        largest = max(geometry.gate_up.weights, geometry.down.weights) * geometry.experts
        rows = max(geometry.gate_up.rows, geometry.down.rows) * geometry.experts
        tables = sum(2 << bits for bits in self._widths) * rows  # twice: padded on their way out
        fitting = largest * self._widths[-1] / 8 + 2 * tables + (1 << 29)
        reading += fitting  # a layer is fitted while it is in memory
        if self._joint:
            squares = geometry.gate_up.cols**2 + geometry.down.cols**2
            reading += 4 * geometry.experts * squares
            reading += refit_bytes(largest, len(self._widths), self._device)
        return int(_PROCESS_BYTES + reading)

    def memory_there(self) -> int:
        """Of the GPU, or of the machine."""
        if self._device.type == "cuda":
            return int(torch.cuda.get_device_properties(self._device).total_memory)
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def read_bytes(self) -> int:
        """Digests, calibration, during which experts are fitted, and the copy of the rest."""
        return 2 * self._geometry.weights * self._itemsize + 3 * self._dense

    def seconds(self) -> dict[str, float]:
        """Time of the forward pass over all tokens and of the codebook fit, disks not counted."""
        geometry = self._geometry
        routed = geometry.weights * geometry.top_k / geometry.experts
        operations = 2 * self._tokens * (routed + self._in_layers() / self._itemsize)
        reading = operations * seconds_per_operation(self._device)
        fitting = geometry.weights * self._seconds_per_weight()
        return {
            "calibration": round(reading, 1),
            "quantize": round(fitting, 1),
        }

    def _head_bytes(self) -> int:
        """Of the output matrix, which `quantize` does not load."""
        names = (n for n, target in self._checkpoint.keymap.dense.items() if "lm_head" in target)
        return sum(group.bytes for group in _groups(self._checkpoint, names))

    def _in_layers(self) -> int:
        """Bytes of the dense tensors of decoder layers."""
        keys = (k for k in self._checkpoint.dense_keys() if re.search(r"\.\d+\.", k))
        return sum(g.bytes for g in _groups(self._checkpoint, keys))

    def _planes(self, bits: int) -> int:
        shapes = [self._geometry.shape(module) for module in MODULES]
        pair = sum(bits * plane_bytes(s.rows, s.cols) for s in shapes)
        return len(self._geometry.layers) * self._geometry.experts * pair

    def _seconds_per_weight(self) -> float:
        """Of the codebook fit, on random rows as long as the model's."""
        cols, device = self._geometry.gate_up.cols, self._device
        rows = torch.randn(max(1, _WEIGHTS_TIMED[device.type] // cols), cols, device=device)
        weights, hessian = torch.ones(1, cols, device=device), torch.eye(cols, device=device)

        def fit() -> None:
            book = fit_codebook(rows, weights, self._widths[0], self._widths[-1], torch.float16)
            if self._joint:
                refit(book, rows[None], hessian[None])

        return timed(fit) / rows.numel()


def _check_room(out: Path, needs: _Needs) -> int:
    """Refuse a disk or a machine that is too small; gives the free bytes of the disk."""
    parent = existing_parent(out)
    if not os.access(parent, os.W_OK):
        raise StoreError(f"cannot write into `{parent}`", "name another folder with -o")
    free = shutil.disk_usage(parent).free
    if free < needs.disk_bytes():
        raise disk_full(out, needs.disk_bytes())
    there = needs.memory_there()
    if there < needs.memory_bytes():
        raise ConfigError(
            f"about {format_bytes(needs.memory_bytes())} of memory are needed, "
            f"{format_bytes(there)} are there",
            "`--codebook kmeans` needs less, and so do shorter samples: --seqlen",
        )
    return free


def _check_output(
    out: Path,
    checkpoint: Checkpoint,
    samples: CalibrationSet,
    config: QuantizeConfig,
    max_bits: int,
    overwrite: bool,
) -> None:
    """Refuse an output folder that `quantize` would refuse (digests of the model not compared)."""
    if not (out / MANIFEST).exists():
        if out.exists():
            raise StoreError(
                f"output exists and is not an artifact: `{out}`",
                "remove it first, or name another folder",
            )
        return
    if overwrite:
        return
    found = Artifact.open(out).manifest
    wanted = Manifest(
        tool_version=pw.__version__,
        model=found.model,
        geometry=checkpoint.geometry,
        min_bits=config.min_bits,
        max_bits=max_bits,
        lut_dtype=found.lut_dtype,
        stages={QUANTIZE: StageRecord(plain(quantize_settings(config, samples)), {})},
    )
    refuse_other(out, found, wanted)


def _block_plan(geometry: ExpertGeometry, module: Module, widths: list[int]) -> BlockPlan:
    shape = geometry.shape(module)
    return BlockPlan(
        count=len(geometry.layers) * geometry.experts,
        rows=shape.rows,
        cols=shape.cols,
        padded=(padded_rows(shape.rows), -(-shape.cols // TILE_COLS) * TILE_COLS),
        bytes_by_width={
            b: b * plane_bytes(shape.rows, shape.cols) + lut_bytes(shape.rows, b) for b in widths
        },
    )


def _groups(checkpoint: Checkpoint, names: Iterable[str]) -> tuple[TensorGroup, ...]:
    """Tensors by name without numbers, in the order of the names."""
    found: dict[str, list[int]] = {}
    for name in sorted(names):
        entry = checkpoint.shards.entry(name)
        found.setdefault(re.sub(r"\d+", "*", name), []).append(entry.stop - entry.start)
    return tuple(TensorGroup(name, len(sizes), sum(sizes)) for name, sizes in found.items())
