"""The stage `sensitivity`: what each block costs at each width, in one unit over all layers.

Two metrics. `output_gradient`: half the mean over calibration tokens of (g . dW x)^2, g the
gradient of the text's loss at the block's output and x its input: the predicted rise of the loss in
nats per token. `hessian`, the paper's: sum of h_j dW_ij^2, h the mean squared input; comparable
within one kind of block only. The column energies sum_i dW_ij^2 give the same for the moments of
any prompt.
Both metrics are held against the measured divergence of a sample of blocks.

Axes: L MoE layers, E experts, M modules (gate_up, down), W widths, N rows, K columns, n tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pw.blocks import MODULES, BlockKey, ExpertGeometry, Module
from pw.config import CalibrationConfig
from pw.models.checkpoint import Checkpoint
from pw.models.dense import ExpertCall, ExpertObserver
from pw.models.dequantized import DequantizedBlocks
from pw.models.tokenizer import load_tokenizer
from pw.store.artifact import Artifact
from pw_pipelines.agreement import Agreement, measure_agreement
from pw_pipelines.calibration import calibration_set
from pw_pipelines.costs import print_reading, sensitivity_operations
from pw_pipelines.gpu_memory import free_bytes
from pw_pipelines.moments import THIN_TOKENS, Moments
from pw_pipelines.observation import CPU, ObservedModel, adding_up, part_of
from pw_pipelines.progress import Progress
from pw_pipelines.ranks import ALONE, Ranks
from pw_pipelines.savepoint import Savepoint
from pw_pipelines.source import source_checkpoint, vocabulary_of

STAGE = "sensitivity"
METRICS = ("output_gradient", "hessian")

# Of decoded errors of a layer kept between batches: on a large GPU all of them.
ERRORS_BYTES = 1 << 28
_CACHE_SHARE = 0.3  # of a GPU's free memory, for the same


@dataclass(frozen=True)
class SensitivityReport:
    """What `sensitivity` found."""

    widths: tuple[int, ...]
    totals: dict[str, tuple[float, ...]]  # metric -> sum over all blocks at each width
    agreement: Agreement
    samples: int
    tokens: int


class GradientSums(ExpertObserver):
    """Sums over tokens of (g . dW x)^2 / 2 for every block and width.

    Args:
        geometry: Of the experts.
        widths: Number of widths W.
        errors: dW [W, N, K] of a block.
        device: Where the sums are: that of the model.
    """

    def __init__(
        self,
        geometry: ExpertGeometry,
        widths: int,
        errors: Callable[[BlockKey], Tensor],
        device: torch.device = CPU,
    ) -> None:
        self.geometry = geometry
        shape = (len(geometry.layers), geometry.experts, len(MODULES), widths)
        self.sums = torch.zeros(shape, dtype=torch.float64, device=device)
        self._errors = errors

    def expert(self, call: ExpertCall) -> None:
        """Wait for the gradients at the outputs of both blocks."""
        self._watch(call, "gate_up", call.inputs.detach(), call.gate_up)
        self._watch(call, "down", call.hidden.detach(), call.output)

    def _watch(self, call: ExpertCall, module: Module, inputs: Tensor, output: Tensor) -> None:
        key = BlockKey(self.geometry.layers[call.slot], call.expert, module)
        sums = self.sums[call.slot, call.expert, MODULES.index(module)]

        def take_in(gradient: Tensor) -> None:  # [n, N]
            sums.add_(output_gradient_sums(self._errors(key), inputs, gradient))

        output.register_hook(take_in)  # type: ignore[no-untyped-call]

    def state(self) -> dict[str, Tensor]:
        """The sums."""
        return {"sums": self.sums}


class BlockErrors:
    """dW [W, N, K] of blocks, asked for layer by layer, and their column energies.

    Args:
        blocks: The blocks of an artifact.
        checkpoint: What it was made from.
        loaded: Gives the weight of a block whose layer is in memory; None = it is read.
    """

    def __init__(
        self,
        blocks: DequantizedBlocks,
        checkpoint: Checkpoint,
        loaded: Callable[[BlockKey], Tensor] | None = None,
    ) -> None:
        self._blocks, self._checkpoint = blocks, checkpoint
        self._loaded = loaded or checkpoint.expert_weight
        self._energies: dict[BlockKey, Tensor] = {}  # [W, K] float32
        self._kept: dict[BlockKey, Tensor] = {}
        self._room = 0

    def __call__(self, key: BlockKey) -> Tensor:
        """Errors of a block in memory; those of its layer are kept while there is room."""
        if key in self._kept:
            return self._kept[key]
        return self._make(key, self._loaded(key))

    def _make(self, key: BlockKey, weight: Tensor) -> Tensor:
        fresh = not any(kept.layer == key.layer for kept in self._kept)
        if fresh:
            self._kept.clear()
        errors = self._blocks.errors(key, weight)
        if fresh:
            self._room = _cache_bytes(errors.device)
        if key not in self._energies:
            sums = [width.double().square().sum(0) for width in errors]  # one at a time in float64
            self._energies[key] = torch.stack(sums).float().cpu()
        if errors.nbytes <= self._room:
            self._kept[key] = errors
            self._room -= errors.nbytes
        return errors

    def energies(self) -> dict[Module, NDArray[np.float32]]:
        """Column energies [L, E, W, K] of each module: sum over rows of dW^2."""
        geometry = self._checkpoint.geometry
        found: dict[Module, list[Tensor]] = {m: [] for m in MODULES}
        for key in list(geometry.keys()):
            if key not in self._energies:  # no token came here, or an earlier run had it
                self._make(key, self._checkpoint.expert_weight(key))
            found[key.module].append(self._energies[key])
        shape = (len(geometry.layers), geometry.experts)
        stacked = {m: torch.stack(parts).numpy() for m, parts in found.items()}
        return {m: array.reshape(*shape, *array.shape[1:]) for m, array in stacked.items()}


def _cache_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return ERRORS_BYTES
    return int(_CACHE_SHARE * free_bytes(device))


def output_gradient_sums(errors: Tensor, inputs: Tensor, gradients: Tensor) -> Tensor:
    """[W] float64: sum over tokens of (g . dW x)^2 / 2; tokens that are not finite are left out.

    Args:
        errors: dW [W, N, K].
        inputs: x [n, K].
        gradients: g [n, N].
    """
    widths, rows, _ = errors.shape
    outputs = (inputs @ errors.flatten(0, 1).T).view(-1, widths, rows)
    dots = torch.einsum("nwr,nr->nw", outputs, gradients)
    return torch.nan_to_num(dots.double().square(), nan=0.0, posinf=0.0).sum(0) / 2


def run(
    path: str | Path,
    config: CalibrationConfig,
    progress: Progress,
    *,
    model: str | None = None,
    overwrite: bool = False,
    device: str = "auto",
    ranks: Ranks = ALONE,
) -> SensitivityReport:
    """Measure all blocks of an artifact and store the table `sensitivity`.

    Args:
        path: Folder of the artifact.
        config: Calibration text.
        progress: Where to report.
        model: The checkpoint it was made from; None = what the artifact names.
        overwrite: Replace a table that was made with other settings.
        device: "auto", "cpu" or "cuda".
        ranks: Who shares the work: each reads a part of the text. The first writes the table.

    Raises:
        PwError: See its subclasses.
    """
    started, artifact, where = time.perf_counter(), Artifact.open(path), ranks.device(device)
    checkpoint = source_checkpoint(artifact, model)
    samples = calibration_set(config, load_tokenizer(artifact.path), vocabulary_of(checkpoint))
    inputs = {**artifact.digests("quantize", "moments"), "calibration": samples.digest}
    if not artifact.table_done(STAGE, config, inputs, overwrite):
        if ranks.first:
            artifact.check_writable()
        savepoint = Savepoint(artifact.path, STAGE, {"device": device, **inputs}, ranks)
        observed = ObservedModel(checkpoint, where, scratch=artifact.path.parent)
        blocks = DequantizedBlocks(artifact, observed.device)
        scores, arrays = _measure(
            artifact, checkpoint, observed, blocks, samples.windows, progress, savepoint, ranks
        )
        if ranks.first:
            agreement = measure_agreement(
                observed, blocks, scores, samples.windows, config.seed, progress
            )
            attrs = {"widths": list(_widths(artifact)), "metrics": list(METRICS)}
            artifact.write_table(
                STAGE, arrays, attrs, config, inputs, {"agreement": agreement}, overwrite
            )
        ranks.wait()
        savepoint.clear()
        artifact = Artifact.open(path)
        print_reading(
            STAGE, time.perf_counter() - started, checkpoint,
            sensitivity_operations(checkpoint, samples.windows.numel(), len(blocks.widths)),
            observed.device, progress,
        )  # fmt: skip
    else:
        progress.note("sensitivity: done already")
    report = _report(artifact, samples.windows)
    _print(report, progress)
    return report


def fill_rare(values: NDArray[np.float64], tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """Shrink scores [L, E, M, W] of rarely seen experts toward their layer's median.

    With n tokens a score weighs n / (n + THIN_TOKENS); an expert that saw none gets the median: it
    may be busy on other text and must not look free.
    """
    seen = (tokens > 0)[:, :, None, None]
    median = np.nanmedian(np.where(seen, values, np.nan), axis=1, keepdims=True)
    count = tokens[:, :, None, None].astype(np.float64)
    shrunk = (count * values + THIN_TOKENS * median) / (count + THIN_TOKENS)
    return np.where(count < THIN_TOKENS, shrunk, values)


def _measure(
    artifact: Artifact,
    checkpoint: Checkpoint,
    model: ObservedModel,
    blocks: DequantizedBlocks,
    windows: Tensor,
    progress: Progress,
    savepoint: Savepoint,
    ranks: Ranks,
) -> tuple[dict[str, NDArray[np.float64]], dict[str, NDArray[np.generic]]]:
    """Scores by metric [L, E, M, W] over all windows [P, S], and the arrays of the table."""
    moments = Moments.from_arrays(artifact.table("moments").arrays)
    errors = BlockErrors(blocks, checkpoint, model.expert_weight)
    sums = GradientSums(artifact.geometry, len(blocks.widths), errors, model.device)
    own = part_of(windows, ranks, model.device)
    there_and_back = 2 * model.layers - artifact.geometry.layers[0]
    savepoint.tell(STAGE, there_and_back, progress)
    with progress.stage(STAGE, model.backward_units(own.shape[0]), "samples x layers") as advance:
        add_up = adding_up(sums, artifact.geometry, ranks)
        model.backward(own, sums, advance, savepoint, add_up)
    energies = errors.energies()
    predicted_tokens = windows.shape[0] * (windows.shape[1] - 1)
    scores = {
        "output_gradient": fill_rare(sums.sums.cpu().numpy() / predicted_tokens, moments.tokens),
        "hessian": fill_rare(_hessian(energies, moments), moments.tokens),
    }
    arrays: dict[str, NDArray[np.generic]] = {
        **{name: values.astype(np.float32) for name, values in scores.items()},
        **{f"energy_{module}": energy for module, energy in energies.items()},
    }
    return scores, arrays


def _widths(artifact: Artifact) -> range:
    return range(artifact.min_bits, artifact.max_bits + 1)


def _hessian(energies: dict[Module, NDArray[np.float32]], moments: Moments) -> NDArray[np.float64]:
    """Sum of h_j dW_ij^2, [L, E, M, W]."""
    parts = [
        np.einsum("lewk,lek->lew", energies[m].astype(np.float64), moments.of(m)) for m in MODULES
    ]
    return np.stack(parts, axis=2)


def _report(artifact: Artifact, windows: Tensor) -> SensitivityReport:
    arrays = artifact.table(STAGE).arrays
    stored = artifact.manifest.stages[STAGE].report["agreement"]
    return SensitivityReport(
        widths=tuple(_widths(artifact)),
        totals={m: tuple(arrays[m].sum((0, 1, 2), dtype=np.float64).tolist()) for m in METRICS},
        agreement=Agreement(**stored),
        samples=windows.shape[0],
        tokens=windows.numel(),
    )


def _print(report: SensitivityReport, progress: Progress) -> None:
    rises = ", ".join(
        f"{b} bits {rise:+.4f}"
        for b, rise in zip(report.widths, report.totals["output_gradient"], strict=True)
    )
    progress.note(f"predicted rise of the loss, nats per token, all blocks at: {rises}")
    found = report.agreement
    ranks = ", ".join(f"{metric} {rank:.2f}" for metric, rank in found.spearman.items())
    progress.note(
        f"rank correlation with the measured divergence of {found.blocks} blocks at "
        f"{found.bits} bits: {ranks}"
    )
