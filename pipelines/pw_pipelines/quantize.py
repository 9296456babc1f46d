"""The stage `quantize`: a checkpoint becomes an artifact of nested bit-planes.

Streams one (layer, module) at a time from the checkpoint; killed at any moment it goes on at the
first unfinished one and the same bytes result. Several ranks read a part of the text each, then fit
a share of the (layer, module) pairs each; the first one publishes. The maths is in `codebook` and
`refit`, the files in `pw.store`.

Axes: E experts, N rows, K columns, B planes.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pw.blocks import MODULES, BlockKey, ExpertGeometry, Module
from pw.config import WIDTHS, QuantizeConfig
from pw.errors import ConfigError, ModelError
from pw.models.checkpoint import Checkpoint
from pw.models.resolve import BUNDLED, resolve_model
from pw.models.tokenizer import load_tokenizer
from pw.store.artifact import Artifact
from pw.store.manifest import ModelRecord
from pw.store.writer import ArtifactWriter
from pw_kernels.bitplane import bit_reverse_lut, lut_bytes, pack_planes, plane_bytes
from pw_pipelines.calibration import CalibrationSet, calibration_set
from pw_pipelines.codebook import fit_codebook
from pw_pipelines.hessians import read_hessians
from pw_pipelines.moments import Moments, measure_moments, report_coverage
from pw_pipelines.observation import ObservedModel
from pw_pipelines.progress import Progress
from pw_pipelines.ranks import ALONE, Ranks
from pw_pipelines.refit import refit
from pw_pipelines.savepoint import Savepoint

RECIPE = "recipe.toml"  # its name in an artifact

_WEIGHTS_PER_FIT = 1 << 24  # experts are fitted together up to this many weights
_FLOAT16_LIMIT = 65504.0


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

    Raises:
        PwError: See its subclasses; a folder left by a stop resumes.
    """
    path = resolve_model(model)
    checkpoint = Checkpoint.open(path)
    samples = calibration_set(config.calibration, load_tokenizer(path))
    geometry = checkpoint.geometry
    itemsize = checkpoint.weight_dtype.itemsize
    max_bits = config.max_bits or auto_max_bits(geometry, config.min_bits, itemsize)
    lut_dtype = choose_lut_dtype(checkpoint)
    settings = quantize_settings(config, samples)
    record = _model_record(model, path, checkpoint)
    open_writer = partial(
        ArtifactWriter.open, out, record, geometry, config.min_bits, max_bits, lut_dtype, settings
    )
    with _open_together(open_writer, overwrite, ranks) as writer:
        moments = _moments(writer, checkpoint, samples, config, progress, device, ranks)
        report_coverage(moments, progress, strict=config.strict_coverage)
        _write_blocks(writer, checkpoint, samples, moments, config, progress, device, ranks)
        if ranks.first:
            _write_rest(writer, checkpoint, recipe)
            report = {"coverage": moments.counts(), "tokens": samples.windows.numel()}
            writer.publish(report)
    ranks.wait()
    artifact = Artifact.open(out)
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
    )


def quantize_settings(config: QuantizeConfig, samples: CalibrationSet) -> dict[str, Any]:
    """Everything but the model that decides the bytes of an artifact."""
    return {
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


def quantize_blocks(
    weights: Tensor,  # [E, N, K]
    moments: Tensor,  # [E, K]
    min_bits: int,
    max_bits: int,
    lut_dtype: torch.dtype,
    hessians: Tensor | None = None,  # [E, K, K]; None: inputs count as uncorrelated
) -> tuple[Tensor, dict[int, Tensor]]:
    """Planes [E, B, tiles, 128] int32 and LUTs {b: [E, N, 2^b]} in kernel order of some experts."""
    experts, rows, cols = weights.shape
    book = fit_codebook(
        weights.flatten(0, 1), moments.repeat_interleave(rows, 0), min_bits, max_bits, lut_dtype
    )
    if hessians is not None:
        book = refit(book, weights, hessians).book
    planes = pack_planes(book.codes.view(experts, rows, cols), max_bits)
    luts = {b: bit_reverse_lut(lut).view(experts, rows, -1) for b, lut in book.luts.items()}
    return planes, luts


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


def _moments(
    writer: ArtifactWriter,
    checkpoint: Checkpoint,
    samples: CalibrationSet,
    config: QuantizeConfig,
    progress: Progress,
    device: str,
    ranks: Ranks,
) -> Moments:
    """Moments of an earlier, interrupted run, or measured now and kept for the next."""
    inputs = {"calibration": samples.digest}
    if writer.table_done("moments", config.calibration, inputs):
        return Moments.from_arrays(writer.table("moments").arrays)
    if samples.available < config.calibration.nsamples:
        progress.note(
            f"calibration text gives {samples.available} samples of {config.calibration.nsamples}"
        )
    known = {"model": dict(writer.manifest.model.files), "device": device, **inputs}
    savepoint = Savepoint(writer.path, "moments", known, ranks)
    try:
        model = ObservedModel(checkpoint, ranks.device(device), scratch=writer.path.parent)
        moments = measure_moments(model, samples.windows, progress, savepoint, ranks)
    except ModelError:  # name the weights at fault where it is they
        for key in list(checkpoint.geometry.keys()):
            _finite_weight(checkpoint, key)
        raise
    if ranks.first:
        report = {"coverage": moments.counts()}
        writer.write_table("moments", moments.arrays(), {}, config.calibration, inputs, report)
    ranks.wait()
    savepoint.clear()
    return moments


def _write_blocks(
    writer: ArtifactWriter,
    checkpoint: Checkpoint,
    samples: CalibrationSet,
    moments: Moments,
    config: QuantizeConfig,
    progress: Progress,
    device: str,
    ranks: Ranks,
) -> None:
    """Blocks; each rank fits its share of those that are not done."""
    geometry, device = checkpoint.geometry, ranks.device(device)
    work = [(layer, module) for layer in geometry.layers for module in MODULES]
    left = [pair for pair in work if not writer.done(*pair)]
    own = ranks.own([float(geometry.shape(module).weights) for _, module in left])
    mine = {left[index] for index in own}
    done = len(work) - len(left)
    with progress.stage("quantize", (done + len(mine)) * geometry.experts, "blocks") as advance:
        advance(done * geometry.experts)

        def fit(layer: int, hessians: Mapping[Module, Tensor]) -> None:
            for module in (m for m in MODULES if (layer, m) in mine):
                planes, luts = _fit(
                    writer, checkpoint, moments, layer, module, device, hessians.get(module)
                )
                writer.write_blocks(layer, module, planes, luts)
                advance(geometry.experts)

        layers = sorted({layer for layer, _ in left})
        if config.codebook == "kmeans":
            for layer in layers:
                fit(layer, {})
        elif layers:
            model = ObservedModel(checkpoint, device, scratch=writer.path.parent)
            read_hessians(model, samples.windows, layers, fit, ranks=ranks)
    ranks.wait()
    writer.find_done()


def _write_rest(writer: ArtifactWriter, checkpoint: Checkpoint, recipe: Path | None) -> None:
    """Dense weights, configuration and tokenizer; what is done is skipped."""
    if writer.complete:
        return
    if not writer.dense_done:
        writer.write_dense((name, checkpoint.read(name)) for name in checkpoint.dense_keys())
    writer.copy_files(checkpoint.path)
    if recipe is not None:
        _keep_recipe(writer, recipe)


def _keep_recipe(writer: ArtifactWriter, recipe: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copyfile(recipe, Path(folder) / RECIPE)
        writer.copy_files(folder, [RECIPE])


def _fit(
    writer: ArtifactWriter,
    checkpoint: Checkpoint,
    moments: Moments,
    layer: int,
    module: Module,
    device: str,
    hessians: Tensor | None,  # [E, K, K]
) -> tuple[Tensor, dict[int, Tensor]]:
    """Planes and LUTs of all experts of one (layer, module), on the CPU."""
    geometry, manifest = checkpoint.geometry, writer.manifest
    mean_squares = torch.from_numpy(moments.of(module)[geometry.slot(layer)])
    group = max(1, _WEIGHTS_PER_FIT // geometry.shape(module).weights)
    parts = []
    for first in range(0, geometry.experts, group):
        experts = range(first, min(first + group, geometry.experts))
        weights = [_finite_weight(checkpoint, BlockKey(layer, e, module)) for e in experts]
        planes, luts = quantize_blocks(
            torch.stack(weights).to(device),
            mean_squares[first : experts.stop].to(device),
            manifest.min_bits,
            manifest.max_bits,
            getattr(torch, manifest.lut_dtype),
            None if hessians is None else hessians[first : experts.stop].to(device),
        )
        parts.append((planes.cpu(), {b: lut.cpu() for b, lut in luts.items()}))
    merged = {b: torch.cat([luts[b] for _, luts in parts]) for b in parts[0][1]}
    return torch.cat([planes for planes, _ in parts]), merged


def _finite_weight(checkpoint: Checkpoint, key: BlockKey) -> Tensor:
    weight = checkpoint.expert_weight(key)
    if not torch.isfinite(weight).all():
        raise ModelError(
            f"weights of {key} are not finite: `{checkpoint.path}`",
            "the checkpoint is damaged: fetch it again",
        )
    return weight


def _model_record(model: str, path: Path, checkpoint: Checkpoint) -> ModelRecord:
    """Provenance. A folder is recorded by its path, a bundled model or hub id by its name."""
    local = model not in BUNDLED and Path(model).expanduser().is_dir()
    config: Any = checkpoint.architecture.config
    return ModelRecord(
        name=path.name if local else model,
        source=str(path) if local else model,
        revision=path.name if path.parent.name == "snapshots" else "",
        architecture=(config.architectures or [config.model_type])[0],
        files=checkpoint.fingerprint(),
    )
