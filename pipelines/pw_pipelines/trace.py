"""The stage `trace`: how each prompt of the calibration text routes, and how it differs.

Stores per prompt the routing, the features of its hidden states and, as target of the residual
heads, y = log s(prompt) - log s for every block, where s is the diagonal score of the block from
the second moments of its inputs and the column energies of its quantization errors. Of all prompts
together, how many tokens went to both of two experts: what ranks that share a model by experts
place them by.

Axes: P prompts, B prompts of a batch, S tokens of a prompt, L MoE layers, E experts,
M modules (gate_up, down), W widths, K columns, F features.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pw.blocks import MODULES, ExpertGeometry, Module
from pw.config import CalibrationConfig
from pw.models.dense import ExpertCall, ExpertObserver
from pw.models.features import feature_count, prompt_features
from pw.models.tokenizer import load_tokenizer
from pw.store.artifact import Artifact
from pw.store.tables import Table
from pw_pipelines.calibration import CalibrationSet, calibration_set
from pw_pipelines.costs import forward_operations, print_reading
from pw_pipelines.observation import CPU, ObservedModel, batches, part_of
from pw_pipelines.progress import Progress
from pw_pipelines.ranks import ALONE, Ranks
from pw_pipelines.savepoint import Savepoint
from pw_pipelines.source import source_checkpoint, vocabulary_of

STAGE = "routing"

_MEASURED = ("mass", "counts", "features", "y")  # arrays with the prompts as first axis
_SUMMED = ("pairs",)  # arrays of all prompts together


@dataclass(frozen=True)
class TraceReport:
    """What `trace` found."""

    prompts: int
    tokens: int
    largest_share: tuple[float, ...]  # per layer: router weight of the busiest expert
    effective_experts: tuple[float, ...]  # per layer: exp of the entropy of the shares
    spread: float  # standard deviation of y over prompts and blocks


@dataclass(frozen=True)
class BlockScores:
    """What the diagonal score of every block is on the calibration text."""

    energies: dict[Module, Tensor]  # [L, E, W, K] float32
    scores: dict[Module, Tensor]  # [L, E, W] float64

    @classmethod
    def from_tables(cls, sensitivity: Table, moments: Table) -> BlockScores:
        """Read column energies and moments of an artifact."""
        energies = {m: torch.from_numpy(sensitivity.arrays[f"energy_{m}"]) for m in MODULES}
        means = {m: torch.from_numpy(moments.arrays[m]).double() for m in MODULES}
        return cls(
            energies,
            {m: torch.einsum("lewk,lek->lew", energies[m].double(), means[m]) for m in MODULES},
        )

    def to(self, device: torch.device) -> BlockScores:
        """The same on a device."""
        if device.type == "cpu":
            return self
        energies, scores = (
            {m: tensors[m].to(device) for m in MODULES} for tensors in (self.energies, self.scores)
        )
        return BlockScores(energies, scores)

    def residual(self, slot: int, expert: int, module: Module, moments: Tensor) -> Tensor:
        """Y [B]: mean over widths of log s(prompt) - log s, from mean squared inputs [B, K].

        Widths at which a score is 0 do not count; nan where none is left.
        """
        here = moments.double() @ self.energies[module][slot, expert].double().T
        usual = self.scores[module][slot, expert]
        usable = (here > 0) & (usual > 0) & torch.isfinite(here)
        ratio = torch.where(usable, here / usual, 1.0).log()
        return ratio.sum(1) / usable.sum(1)  # 0 / 0 = nan


class PromptTraces(ExpertObserver):
    """Traces of the prompts of one batch; its T = B * S tokens come prompt after prompt.

    They are where the model is: nothing waits for a GPU.
    """

    def __init__(
        self,
        geometry: ExpertGeometry,
        scores: BlockScores,
        prompts: int,
        length: int,
        device: torch.device = CPU,
    ) -> None:
        self._scores, self._prompts, self._length = scores, prompts, length
        shape = (prompts, len(geometry.layers), geometry.experts)
        features = feature_count(geometry.gate_up.cols)
        self.mass = torch.zeros(shape, device=device)  # sums of router weight
        self.counts = torch.zeros(shape, dtype=torch.int32, device=device)
        self.features = torch.zeros((*shape[:2], features), device=device)
        self.y = torch.full((*shape, len(MODULES)), torch.nan, device=device)
        square = (*shape[1:], geometry.experts)
        self.pairs = torch.zeros(square, dtype=torch.int64, device=device)  # tokens of both experts

    def routed(self, slot: int, inputs: Tensor, ids: Tensor, weights: Tensor) -> None:
        """Take in features, counts and router weight of a layer."""
        split = (self._prompts, self._length, -1)
        for prompt, hidden in enumerate(inputs.view(split)):
            self.features[prompt, slot] = prompt_features(hidden)
        experts = self.mass.shape[2]
        chosen = torch.nn.functional.one_hot(ids.view(split), experts)  # [B, S, k, E]
        self.counts[:, slot] = chosen.sum((1, 2)).int()
        seen = chosen.sum(2).flatten(0, 1).float()  # [T, E]; sums of ones are exact in fp32
        self.pairs[slot] = (seen.T @ seen).long()
        weight = weights.float().view(split)[..., None] * chosen
        self.mass[:, slot] = weight.sum((1, 2))

    def expert(self, call: ExpertCall) -> None:
        """Take in the targets of both blocks."""
        prompt = call.tokens // self._length
        for index, (module, inputs) in enumerate(
            zip(MODULES, (call.inputs, call.hidden), strict=True)
        ):
            squares = inputs.new_zeros((self._prompts, inputs.shape[1]))
            squares.index_add_(0, prompt, inputs.square())
            count = self.counts[:, call.slot, call.expert, None]
            y = self._scores.residual(call.slot, call.expert, module, squares / count.clamp_min(1))
            self.y[:, call.slot, call.expert, index] = y.float()

    def state(self) -> dict[str, Tensor]:
        """All arrays."""
        return {name: getattr(self, name) for name in (*_MEASURED, *_SUMMED)}


def run(
    path: str | Path,
    config: CalibrationConfig,
    progress: Progress,
    *,
    model: str | None = None,
    overwrite: bool = False,
    device: str = "auto",
    ranks: Ranks = ALONE,
) -> TraceReport:
    """Trace the calibration prompts and store the table `routing`.

    Args:
        path: Folder of an artifact that has sensitivities.
        config: Calibration text; each sample is a prompt.
        progress: Where to report.
        model: The checkpoint it was made from; None = what the artifact names.
        overwrite: Replace a table that was made with other settings.
        device: "auto", "cpu" or "cuda".
        ranks: Who shares the work: each traces a part of the prompts. The first writes the table.

    Raises:
        PwError: See its subclasses.
    """
    started, artifact, where = time.perf_counter(), Artifact.open(path), ranks.device(device)
    checkpoint = source_checkpoint(artifact, model)
    samples = calibration_set(config, load_tokenizer(artifact.path), vocabulary_of(checkpoint))
    inputs = {**artifact.digests("moments", "sensitivity"), "calibration": samples.digest}
    if not artifact.table_done(STAGE, config, inputs, overwrite):
        if ranks.first:
            artifact.check_writable()
        what = {"device": device, "measured": [*_MEASURED, *_SUMMED], **inputs}
        savepoint = Savepoint(artifact.path, STAGE, what, ranks)
        observed = ObservedModel(checkpoint, where, scratch=artifact.path.parent)
        arrays = _measure(artifact, observed, samples, progress, savepoint, ranks)
        if ranks.first:
            attrs = {"seqlen": config.seqlen}
            artifact.write_table(STAGE, arrays, attrs, config, inputs, {}, overwrite)
        ranks.wait()
        savepoint.clear()
        artifact = Artifact.open(path)
        print_reading(
            "trace", time.perf_counter() - started, checkpoint,
            forward_operations(checkpoint, samples.windows.numel()), observed.device, progress,
        )  # fmt: skip
    else:
        progress.note("trace: done already")
    report = _report(artifact)
    _print(report, progress)
    return report


def _measure(
    artifact: Artifact,
    model: ObservedModel,
    samples: CalibrationSet,
    progress: Progress,
    savepoint: Savepoint,
    ranks: Ranks,
) -> dict[str, NDArray[np.generic]]:
    scores = BlockScores.from_tables(artifact.table("sensitivity"), artifact.table("moments"))
    own = part_of(samples.windows, ranks, model.device)
    none = PromptTraces(artifact.geometry, scores, 0, own.shape[1])  # of a rank without text
    scores = scores.to(model.device)
    traces = [
        PromptTraces(artifact.geometry, scores, batch.shape[0], batch.shape[1], model.device)
        for batch in batches(own, model.device)
    ]
    savepoint.tell("trace", model.layers, progress)
    with progress.stage("trace", own.shape[0] * model.layers, "prompts x layers") as advance:
        model.read(own, traces, advance=advance, savepoint=savepoint)
    arrays: dict[str, NDArray[np.generic]] = {}
    for name in _MEASURED:
        rows = torch.cat([getattr(trace, name).cpu() for trace in (none, *traces)]).numpy()
        arrays[name] = ranks.join_rows(rows)
    for name in _SUMMED:
        total = torch.stack([getattr(trace, name).cpu() for trace in (none, *traces)]).sum(0)
        ranks.add_up([total])
        arrays[name] = total.numpy()
    arrays["tokens"] = np.full(samples.windows.shape[0], samples.windows.shape[1], np.int64)
    arrays["documents"] = np.array(samples.documents, np.int64)
    return arrays


def _report(artifact: Artifact) -> TraceReport:
    arrays = artifact.table(STAGE).arrays
    mass = arrays["mass"].sum(0, dtype=np.float64)
    shares = mass / mass.sum(1, keepdims=True)
    entropy = -(shares * np.log(np.maximum(shares, np.finfo(np.float64).tiny))).sum(1)
    return TraceReport(
        prompts=len(arrays["tokens"]),
        tokens=int(arrays["tokens"].sum()),
        largest_share=tuple(shares.max(1).tolist()),
        effective_experts=tuple(np.exp(entropy).tolist()),
        spread=float(np.nanstd(arrays["y"].astype(np.float64))),
    )


def _print(report: TraceReport, progress: Progress) -> None:
    shares = " ".join(f"{share:.0%}" for share in report.largest_share)
    experts = " ".join(f"{count:.1f}" for count in report.effective_experts)
    progress.note(f"busiest expert's share by layer: {shares}; effective experts: {experts}")
    progress.note(
        f"{report.prompts} prompts; log score of a block varies by {report.spread:.2f} over prompts"
    )
