"""What the offline stages would do, from headers alone: plan, sizes, memory, disk, time, refusals.

Reads no weight. Whatever can be known to fail later fails here, with the error it would end in. A
model that is not here is planned from its config.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
from pw_pipelines.calibration import CalibrationSet, calibration_set
from pw_pipelines.needs import Needs, StageNeeds
from pw_pipelines.quantize import auto_max_bits, quantize_settings, uniform_bytes
from pw_pipelines.ranks import usable_device
from pw_pipelines.source import vocabulary_of
from pw_pipelines.subject import Subject


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
    """What the stages would do."""

    model: str
    architecture: str
    config_file: Path | None  # what all is drawn from where the checkpoint is not here
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
    stages: tuple[StageNeeds, ...]
    memory_bytes: int  # peak of all stages, estimated
    memory_there: int
    disk_bytes: int  # of all artifacts and, while they are made, hidden states
    disk_free: int


def run(
    model: str,
    out: str | Path,
    config: QuantizeConfig,
    *,
    overwrite: bool = False,
    device: str = "auto",
    stages: Sequence[str] = (QUANTIZE,),
    artifacts: int = 1,
    steps: int = 0,
) -> DryRunReport:
    """Plan what `quantize.run` with the same arguments would do, and the stages that follow.

    Args:
        model: As `quantize.run` takes it.
        out: Folder of the artifact that `quantize` makes.
        config: Widths and calibration text.
        overwrite: Whether an artifact of other settings may be replaced.
        device: "auto", "cpu" or "cuda".
        stages: What would run, in this order: "quantize", "sensitivity", "tune", "distillation",
            "trace".
        artifacts: How many of them are on the disk at a time.
        steps: Of the distillation.

    Raises:
        PwError: What `quantize.run` would raise, as far as it does not depend on weights; a disk or
            a memory too small for one of the stages.
    """
    path, out = resolve_model(model), Path(out)
    checkpoint = Checkpoint.open(path)
    samples = calibration_set(config.calibration, load_tokenizer(path), vocabulary_of(checkpoint))
    subject = Subject.of_checkpoint(checkpoint)
    _check_output(out, subject, samples, config, _max_bits(subject, config), overwrite)
    shape = samples.windows.shape[0], samples.windows.shape[1]
    report = _plan(model, subject, out, config, shape, device, stages, artifacts, steps)
    _check_room(out, report)
    return report


def run_config(
    model: str,
    file: Path,
    out: str | Path,
    config: QuantizeConfig,
    *,
    device: str = "auto",
    stages: Sequence[str] = (QUANTIZE,),
    artifacts: int = 1,
    steps: int = 0,
) -> DryRunReport:
    """Plan for a model of which nothing but its config is here; arguments as those of `run`.

    The calibration text counts as long enough. Room that is lacking is told, not refused.

    Raises:
        ModelError: No readable config, or a model that cannot be served.
        ConfigError: No width would save anything.
    """
    subject, text = Subject.of_config(file), config.calibration
    shape = text.nsamples, text.seqlen
    report = _plan(model, subject, Path(out), config, shape, device, stages, artifacts, steps)
    return replace(report, config_file=file)


def _plan(
    model: str,
    subject: Subject,
    out: Path,
    config: QuantizeConfig,
    text: tuple[int, int],
    device: str,
    stages: Sequence[str],
    artifacts: int,
    steps: int,
) -> DryRunReport:
    """The plan for a text of so many samples and tokens in each."""
    geometry, itemsize = subject.geometry, subject.dtype.itemsize
    max_bits = _max_bits(subject, config)
    widths = [b for b in WIDTHS if config.min_bits <= b <= max_bits]
    where = torch.device(usable_device(device))
    needs = Needs(subject, text, widths, config.codebook, where)
    kinds: dict[str, Callable[[], StageNeeds]] = {
        QUANTIZE: needs.quantize, "sensitivity": needs.sensitivity, "tune": needs.tune,
        "distillation": partial(needs.distillation, steps), "trace": needs.trace,
    }  # fmt: skip
    known = {name: kinds[name]() for name in dict.fromkeys(stages)}
    dtype = str(subject.dtype).removeprefix("torch.")
    return DryRunReport(
        model=model,
        architecture=subject.architecture.name,
        config_file=None,
        output=out,
        blocks=geometry.blocks,
        plan={module: _block_plan(geometry, module, widths) for module in MODULES},
        min_bits=config.min_bits,
        max_bits=max_bits,
        lut_dtype="float16, or bfloat16 if a weight needs it" if dtype == "float32" else dtype,
        dense_bytes=geometry.weights * itemsize,
        bytes_by_width={b: uniform_bytes(geometry, b) for b in widths},
        left_alone=_groups(subject.copied),
        not_copied=_groups(subject.ignored),
        samples=text[0],
        tokens=math.prod(text),
        stages=tuple(known[name] for name in stages),
        memory_bytes=max(stage.memory_bytes for stage in known.values()),
        memory_there=needs.memory_there(),
        disk_bytes=artifacts * needs.artifact_bytes()
        + max(stage.scratch_bytes for stage in known.values()),
        disk_free=shutil.disk_usage(existing_parent(out)).free,
    )


def _max_bits(subject: Subject, config: QuantizeConfig) -> int:
    least, itemsize = config.min_bits, subject.dtype.itemsize
    return config.max_bits or auto_max_bits(subject.geometry, least, itemsize)


def _check_room(out: Path, report: DryRunReport) -> None:
    """Refuse a disk or a machine that is too small."""
    parent = existing_parent(out)
    if not os.access(parent, os.W_OK):
        raise StoreError(f"cannot write into `{parent}`", "name another folder with -o")
    if report.disk_free < report.disk_bytes:
        raise disk_full(out, report.disk_bytes)
    if report.memory_there < report.memory_bytes:
        largest = max(report.stages, key=lambda stage: stage.memory_bytes).stage
        hint = "`--codebook kmeans` needs less, and so do shorter samples: --seqlen"
        if largest == "distillation":
            hint = "leave `distill` out, or use a device with more memory"
        raise ConfigError(
            f"about {format_bytes(report.memory_bytes)} of memory are needed, "
            f"{format_bytes(report.memory_there)} are there",
            hint,
        )


def _check_output(
    out: Path,
    subject: Subject,
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
        geometry=subject.geometry,
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


def _groups(sizes: Mapping[str, int]) -> tuple[TensorGroup, ...]:
    """Bytes of tensors by name without numbers, in the order of the names."""
    found: dict[str, list[int]] = {}
    for name, size in sorted(sizes.items()):
        found.setdefault(re.sub(r"\d+", "*", name), []).append(size)
    return tuple(TensorGroup(name, len(each), sum(each)) for name, each in found.items())
