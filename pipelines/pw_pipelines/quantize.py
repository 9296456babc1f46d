"""The stage `quantize`: a checkpoint becomes an artifact of nested bit-planes.

The model reads the calibration text once, layer by layer; when a layer has been read its moments
are known and its experts in memory, and they are fitted and written before the next one is loaded.
Killed at any moment it goes on at the first unfinished (layer, module) and the same bytes result;
text whose hidden states need a file is not read again below that layer, other text is little.
Several ranks read a part of the text each and fit a share of the (layer, module) pairs each; the
first one publishes.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pw.blocks import MODULES, ExpertGeometry, Module
from pw.config import WIDTHS, QuantizeConfig
from pw.errors import ConfigError, ModelError
from pw.models.checkpoint import Checkpoint
from pw.models.header import DTYPES
from pw.models.resolve import BUNDLED, pinned, resolve_model
from pw.models.shards import ShardIndex
from pw.models.tokenizer import load_tokenizer
from pw.store.artifact import QUANTIZE, Artifact
from pw.store.files import disk_full, existing_parent
from pw.store.manifest import ModelRecord
from pw.store.tensor_file import TensorSource
from pw.store.writer import ArtifactWriter
from pw_kernels.bitplane import lut_bytes, plane_bytes
from pw_pipelines.behind import Behind
from pw_pipelines.calibration import CalibrationSet, calibration_set
from pw_pipelines.costs import QuantizeCosts, floor_seconds, print_costs
from pw_pipelines.fitting import BlockFitter, refuse_infinite
from pw_pipelines.focus import Focus
from pw_pipelines.moments import Moments, measure_moments, report_coverage
from pw_pipelines.observation import ObservedModel, part_of
from pw_pipelines.outputs import WINDOWS, measure_outputs
from pw_pipelines.progress import Progress
from pw_pipelines.ranks import ALONE, Ranks
from pw_pipelines.savepoint import Savepoint
from pw_pipelines.source import vocabulary_of

RECIPE = "recipe.toml"  # its name in an artifact

_FLOAT16_LIMIT = 65504.0
_JOBS_BEHIND = {"cpu": 0, "cuda": 2}  # files that are written while a GPU computes on


@dataclass(frozen=True)
class QuantizeReport:
    """What `quantize` made."""

    path: Path
    min_bits: int
    max_bits: int
    lut_dtype: str
    blocks: int
    dense_bytes: int  # of the routed experts in the checkpoint
    bytes_by_width: dict[int, int]  # planes and LUT of all blocks
    coverage: dict[str, int]  # experts by `Coverage`
    samples: int
    tokens: int
    costs: QuantizeCosts


def run(
    model: str,
    out: str | Path,
    config: QuantizeConfig,
    progress: Progress,
    *,
    overwrite: bool = False,
    device: str = "auto",
    recipe: Path | None = None,
    ranks: Ranks = ALONE,
    focus: Focus | None = None,
) -> QuantizeReport:
    """Quantize the routed experts of `model` into the artifact `out`.

    Args:
        model: `tiny`, a folder or a hub id.
        out: Folder of the artifact, `X.pw`.
        config: Widths and calibration text.
        progress: Where to report.
        overwrite: Start again where `out` was made with other settings.
        device: "auto", "cpu" or "cuda".
        recipe: File that says how the artifact is made, kept in it.
        ranks: Who shares the work; each calls this with equal arguments.
        focus: The width of each block that counts most; None: all count alike.

    Raises:
        PwError: See its subclasses; a folder left by a stop resumes.
    """
    started, where = time.perf_counter(), torch.device(ranks.device(device))
    path = resolve_model(model)
    checkpoint = Checkpoint.open(path)
    samples = calibration_set(config.calibration, load_tokenizer(path), vocabulary_of(checkpoint))
    geometry = checkpoint.geometry
    itemsize = checkpoint.weight_dtype.itemsize
    max_bits = config.max_bits or auto_max_bits(geometry, config.min_bits, itemsize)
    lut_dtype = choose_lut_dtype(checkpoint)
    settings = quantize_settings(config, samples, focus)
    record = _model_record(model, path, checkpoint)
    opening = time.perf_counter() - started
    open_writer = partial(
        ArtifactWriter.open, out, record, geometry, config.min_bits, max_bits, lut_dtype, settings
    )
    with (
        _open_together(open_writer, overwrite, ranks) as writer,
        Behind(_JOBS_BEHIND[where.type]) as behind,
    ):
        done = writer.complete
        _check_room(writer, dense_sources(checkpoint))
        copied = ShardIndex.open(path)  # counts by itself what is read behind
        if ranks.first and _JOBS_BEHIND[where.type]:
            behind.do(partial(writer.write_dense, dense_sources(checkpoint, copied)))
        moments, seconds = _fit_layers(
            writer, checkpoint, samples, config, progress, where, ranks, focus, behind
        )
        if ranks.first:
            write_rest(writer, checkpoint, recipe, copied)
            report = {"coverage": moments.counts(), "tokens": samples.windows.numel()}
            writer.publish(report)
    ranks.wait()
    artifact = Artifact.open(out)
    seconds = {"opening": opening, **seconds}
    seconds["publishing"] = time.perf_counter() - started - sum(seconds.values())
    costs = QuantizeCosts(
        seconds, checkpoint.shards.bytes_read + copied.bytes_read, checkpoint.shards.nbytes,
        floor_seconds(checkpoint, samples.windows.numel(), artifact.manifest.widths, config, where),
    )  # fmt: skip
    quantized = len(artifact.manifest.blocks) * geometry.experts
    print_costs(costs, geometry.blocks, quantized, progress, done=done)
    return QuantizeReport(
        path=Path(out),
        min_bits=artifact.min_bits,
        max_bits=artifact.max_bits,
        lut_dtype=artifact.manifest.lut_dtype,
        blocks=geometry.blocks,
        dense_bytes=geometry.weights * itemsize,
        bytes_by_width={b: uniform_bytes(geometry, b) for b in artifact.manifest.widths},
        coverage=moments.counts(),
        samples=samples.windows.shape[0],
        tokens=samples.windows.numel(),
        costs=costs,
    )


def quantize_settings(
    config: QuantizeConfig, samples: CalibrationSet, focus: Focus | None = None
) -> dict[str, Any]:
    """Everything but the model that decides the bytes of an artifact."""
    tuned = {} if focus is None else {"focus": focus.settings(), "gradient_windows": WINDOWS}
    return {
        **tuned,
        "min_bits": config.min_bits,
        "max_bits": config.max_bits,
        "codebook": config.codebook,
        "calibration": config.calibration,
        "calibration_tokens": samples.digest,
    }


def uniform_bytes(geometry: ExpertGeometry, bits: int) -> int:
    """Bytes of planes and LUTs of all blocks at one width, tile padding included."""
    shapes = [geometry.shape(module) for module in MODULES]
    pair = sum(bits * plane_bytes(s.rows, s.cols) + lut_bytes(s.rows, bits) for s in shapes)
    return len(geometry.layers) * geometry.experts * pair


def auto_max_bits(geometry: ExpertGeometry, min_bits: int, itemsize: int) -> int:
    """The widest width whose bytes, LUT included, stay below those of the dense weights.

    Raises:
        ConfigError: Even `min_bits` takes as many bytes.
    """
    dense = geometry.weights * itemsize
    widths = [b for b in WIDTHS if b >= min_bits and uniform_bytes(geometry, b) < dense]
    if not widths:
        raise ConfigError(
            f"{min_bits} bits take {uniform_bytes(geometry, min_bits)} bytes with their tables, "
            f"the dense experts {dense}: nothing to gain",
            "the rows of this model are too short; --max-bits forces a width",
        )
    return max(widths)


def choose_lut_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The checkpoint's own 2-byte dtype; for float32, float16 where all weights fit in it."""
    if checkpoint.weight_dtype in (torch.bfloat16, torch.float16):
        return checkpoint.weight_dtype
    keys = checkpoint.geometry.keys()
    fits = all(checkpoint.expert_weight(k).abs().max() <= _FLOAT16_LIMIT for k in keys)
    return torch.float16 if fits else torch.bfloat16


def _open_together(
    open_writer: Callable[..., ArtifactWriter], overwrite: bool, ranks: Ranks
) -> ArtifactWriter:
    """The writer of each rank: the first one makes the folder and holds its lock."""
    if ranks.first:
        writer = open_writer(overwrite)
        ranks.wait()
    else:
        ranks.wait()
        writer = open_writer(overwrite, beside=True)
    ranks.wait()  # all have read what is there before anybody adds to it
    return writer


def _fit_layers(
    writer: ArtifactWriter,
    checkpoint: Checkpoint,
    samples: CalibrationSet,
    config: QuantizeConfig,
    progress: Progress,
    device: torch.device,
    ranks: Ranks,
    focus: Focus | None,
    behind: Behind,
) -> tuple[Moments, dict[str, float]]:
    """Moments of all layers, and their blocks: each rank fits its share of those that are not
    done. Also the seconds that went into reading and fitting.
    """
    started = time.perf_counter()
    work = [(layer, module) for layer in checkpoint.geometry.layers for module in MODULES]
    left = [pair for pair in work if not writer.done(*pair)]
    _say_what_is_there(writer, len(work), left, progress)
    costs = [float(checkpoint.geometry.shape(module).weights) for _, module in left]
    mine = {left[index] for index in ranks.own(costs)}
    fitter = BlockFitter(writer, checkpoint, mine, device, focus, behind)
    inputs = {"calibration": samples.digest}
    measured = writer.table_done("moments", config.calibration, inputs)
    if measured and (not left or config.codebook == "kmeans"):
        moments = Moments.from_arrays(writer.table("moments").arrays)
        report_coverage(moments, progress, strict=config.strict_coverage)
        for slot, layer in enumerate(checkpoint.geometry.layers):
            fitter.fit(layer, moments.layer(slot), {}, checkpoint.expert_weight)
    else:
        layers = {layer for layer, _ in left}
        moments = _read(
            writer, checkpoint, samples, config, progress, ranks, fitter, layers, focus, behind
        )
        report_coverage(moments, progress, strict=config.strict_coverage)
        behind.finish()
        if ranks.first and not measured:
            report = {"coverage": moments.counts(), "dropped": moments.dropped}
            writer.write_table("moments", moments.arrays(), {}, config.calibration, inputs, report)
    behind.finish()
    ranks.wait()
    writer.find_done()
    reading = time.perf_counter() - started - fitter.seconds
    return moments, {"reading": reading, "fitting": fitter.seconds}


def _check_room(writer: ArtifactWriter, dense: Mapping[str, TensorSource]) -> None:
    """Refuse a disk that has no room for all that is still to be written.

    Raises:
        PartialResultError: It is too small.
    """
    copied = 0 if writer.dense_done else sum(source.nbytes for source in dense.values())
    needed = writer.bytes_needed() + copied
    if shutil.disk_usage(existing_parent(writer.path)).free < needed:
        raise disk_full(writer.path, needed)


def _say_what_is_there(
    writer: ArtifactWriter, whole: int, left: list[tuple[int, Module]], progress: Progress
) -> None:
    """Say that a run goes on, and from where."""
    if writer.complete or len(left) == whole:
        return
    following = f"next is layer {left[0][0]} {left[0][1]}" if left else "they need publishing only"
    progress.note(
        f"quantize: goes on from `{writer.path}.partial`: {whole - len(left)} of {whole} (layer, "
        f"module) pairs are there, {following}"
    )


def _read(
    writer: ArtifactWriter,
    checkpoint: Checkpoint,
    samples: CalibrationSet,
    config: QuantizeConfig,
    progress: Progress,
    ranks: Ranks,
    fitter: BlockFitter,
    layers: set[int],
    focus: Focus | None,
    behind: Behind,
) -> Moments:
    """Read the text and fit the blocks of `layers` on the way."""
    if samples.available < config.calibration.nsamples:
        progress.note(
            f"calibration text gives {samples.available} samples of {config.calibration.nsamples}"
        )
    known = {
        "model": dict(writer.manifest.model.files), "device": fitter.device.type,
        "calibration": samples.digest,
    }  # fmt: skip
    savepoint = Savepoint(writer.path, QUANTIZE, known, ranks)
    if layers and savepoint.done() > min(layers):  # somebody removed blocks, not the savepoint
        savepoint.clear()
    model = ObservedModel(checkpoint, str(fitter.device), scratch=writer.path.parent)
    savepoint.tell(QUANTIZE, model.layers, progress)
    windows = samples.windows

    def give(layer: int, moments: Moments, hessians: Mapping[Module, Tensor]) -> None:
        if config.strict_coverage:
            report_coverage(moments, progress, strict=True, layer=layer)
        fitter.fit(layer, moments, hessians, model.expert_weight)
        if savepoint.opened:  # what it counts as done is on the disk
            behind.finish()

    if layers and focus is not None:
        fitter.outputs = measure_outputs(model, windows, progress)
    units = len(part_of(windows, ranks, fitter.device)) * model.layers
    try:
        with progress.stage("calibration", units, "samples x layers") as advance:
            moments = measure_moments(
                model, windows, give,
                hessians=layers if config.codebook == "joint" else (),
                advance=advance, savepoint=savepoint, ranks=ranks,
            )  # fmt: skip
    except (ConfigError, ModelError) as error:
        savepoint.clear()  # equal inputs would end here again
        if isinstance(error, ModelError):  # name the weights at fault where it is they
            refuse_infinite(checkpoint, list(checkpoint.geometry.keys()), checkpoint.expert_weight)
        raise
    ranks.wait()
    savepoint.clear()
    return moments


def write_rest(
    writer: ArtifactWriter, checkpoint: Checkpoint, recipe: Path | None, shards: ShardIndex
) -> None:
    """Dense weights, configuration and tokenizer; what is done is skipped."""
    if writer.complete:
        return
    writer.write_dense(dense_sources(checkpoint, shards))
    writer.copy_files(checkpoint.path)
    if recipe is not None:
        _keep_recipe(writer, recipe)


def dense_sources(
    checkpoint: Checkpoint, shards: ShardIndex | None = None
) -> dict[str, TensorSource]:
    """All tensors but expert weights by their names on disk, to be read when they are written,
    from another opened index of the same files if given.
    """
    shards, found = shards or checkpoint.shards, {}
    for name in checkpoint.dense_keys():
        entry = shards.entry(name)
        read = partial(shards.read, name)
        found[name] = TensorSource(DTYPES[entry.dtype], entry.shape, read)
    return found


def _keep_recipe(writer: ArtifactWriter, recipe: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copyfile(recipe, Path(folder) / RECIPE)
        writer.copy_files(folder, [RECIPE])


def _model_record(model: str, path: Path, checkpoint: Checkpoint) -> ModelRecord:
    """Provenance. A folder is recorded by its path, a bundled model or hub id by its name."""
    local = model not in BUNDLED and Path(model).expanduser().is_dir()
    config: Any = checkpoint.architecture.config
    return ModelRecord(
        name=path.name if local else model,
        source=str(path) if local else model if model in BUNDLED else pinned(model, path),
        revision=path.name if path.parent.name == "snapshots" else "",
        architecture=(config.architectures or [config.model_type])[0],
        files=checkpoint.fingerprint(),
    )
