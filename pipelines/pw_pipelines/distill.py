"""Codes and tables of planned widths, trained on the divergence from the unquantized model.

The refit (`pw_pipelines.refit`) sees one block at a time. Here all blocks stand at the widths they
were fitted for, and what counts is KL(unquantized, quantized) of the next token over calibration
text. Latent values of all weights, which codes follow (`pw_pipelines.latents`; PV-tuning, arXiv
2405.14852, trains codes, too), and levels move by Adam. Dense weights stay the checkpoint's.

Axes: N rows, K columns, W windows, S tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pw.blocks import MODULES, BlockKey
from pw.config import QuantizeConfig, TuneConfig, format_bytes
from pw.errors import ConfigError
from pw.models.checkpoint import Checkpoint
from pw.models.dense import ExpertCall, ExpertObserver
from pw.models.shards import ShardIndex
from pw.store.artifact import QUANTIZE, Artifact
from pw.store.files import remove_tree
from pw.store.writer import ArtifactWriter
from pw_pipelines.focus import Focus
from pw_pipelines.gpu_memory import free_bytes, host_bytes
from pw_pipelines.latents import RATE, Blocks
from pw_pipelines.observation import CPU, ObservedModel, batches
from pw_pipelines.progress import Progress
from pw_pipelines.quantize import quantize_settings, write_rest
from pw_pipelines.trained import Distilled, Trained
from pw_pipelines.training_text import TrainingText, read_texts

WINDOWS_PER_STEP = 16
_WARM_UP = 0.05  # of all steps; then the rate falls as half a cosine
_BETAS = (0.9, 0.99)
_BYTES = (
    40  # a weight: latent, gradient, two moments, level, its gradient, its place (int64), spare
)
_SEED = 0


def distill_bytes(weights: int) -> int:
    """Bytes on the device for so many weights of routed experts, activations apart."""
    return weights * _BYTES


class _Gradients(ExpertObserver):
    """Sums of the gradients at the weights of all blocks."""

    def __init__(self, model: ObservedModel) -> None:
        self._layers = model.geometry.layers
        self.sums: dict[BlockKey, Tensor] = {}

    def expert(self, call: ExpertCall) -> None:
        """Wait for the gradients at both outputs."""
        pairs = ((call.gate_up, call.inputs), (call.output, call.hidden))
        for module, (output, inputs) in zip(MODULES, pairs, strict=True):
            key = BlockKey(self._layers[call.slot], call.expert, module)
            output.register_hook(partial(self._add, key, inputs.detach()))  # type: ignore[no-untyped-call]

    def _add(self, key: BlockKey, inputs: Tensor, gradient: Tensor) -> None:
        product = gradient.T @ inputs
        self.sums[key] = self.sums[key] + product if key in self.sums else product


class Distillation:
    """Training of `Blocks` on windows of text.

    Args:
        model: The unquantized model.
        blocks: What is trained.
        steps: In all.
    """

    def __init__(self, model: ObservedModel, blocks: Blocks, steps: int) -> None:
        self._model, self._blocks, self._steps = model, blocks, steps
        fused = {"fused": True} if model.device.type == "cuda" else {}
        self._adam = torch.optim.Adam(blocks.groups, betas=_BETAS, eps=1e-15, **fused)

    def divergence(self, windows: Tensor) -> float:
        """Mean KL over the tokens of windows [W, S], nats."""
        self._blocks.refresh()
        right = self._model.read(windows)
        found = self._model.read(windows, weights=self._blocks.weight)
        total = 0.0
        for batch, ids in enumerate(batches(windows, self._model.device)):
            pair = found.get(0, batch), right.get(0, batch)
            total += float(self._model.divergence(ids, *pair, gradient=False)[0])
        return total / windows.numel()

    def step(self, windows: Tensor, done: float) -> None:
        """One step of Adam on windows [W, S]; `done` is the part of the training that is over."""
        self._blocks.refresh()
        right = self._model.read(windows)
        gradients = _Gradients(self._model)

        def loss(batch: int, ids: Tensor, output: Tensor) -> Tensor:
            gradient = self._model.divergence(ids, output, right.get(0, batch))[1]
            assert gradient is not None
            return gradient / windows.numel()

        self._model.backward(windows, gradients, weights=self._blocks.weight, loss=loss)
        factor = min(1.0, done / _WARM_UP) * (0.5 + 0.5 * math.cos(math.pi * done))
        for group in self._adam.param_groups:
            group["lr"] = group["top"] * max(factor, 1e-3)
        self._adam.zero_grad(set_to_none=True)
        self._blocks.backward(gradients.sums)
        self._adam.step()

    def run(self, windows: Tensor, progress: Progress) -> None:
        """All steps, over windows [W, S] in an order that depends on the seed alone."""
        drawn = _draws(len(windows), np.random.default_rng(_SEED))
        with progress.stage("distillation", self._steps, "steps") as advance:
            for step in range(self._steps):
                some = [next(drawn) for _ in range(min(WINDOWS_PER_STEP, len(windows)))]
                self.step(windows[some], (step + 0.5) / self._steps)
                advance(1)


def _draws(count: int, rng: np.random.Generator) -> Iterator[int]:
    """Numbers below `count`, all before any comes again."""
    while True:
        yield from rng.permutation(count).tolist()


def check_room(weights: int, device: torch.device) -> None:
    """Refuse a model whose routed experts cannot be trained at once.

    Raises:
        ConfigError: The device has too little memory.
    """
    needed = distill_bytes(weights)
    free = free_bytes(device) if device.type == "cuda" else host_bytes()
    if needed > free:
        raise ConfigError(
            f"distillation takes {format_bytes(needed)} for all routed experts at once, "
            f"{format_bytes(free)} are free",
            "leave --distill out, or use a device with more memory",
        )


def run(
    fit: Callable[[Path], Artifact],
    out: Path,
    start: Artifact,
    settings: QuantizeConfig,
    focus: Focus,
    config: TuneConfig,
    checkpoint: Checkpoint,
    progress: Progress,
    *,
    overwrite: bool = False,
    device: torch.device = CPU,
    recipe: Path | None = None,
) -> None:
    """Fit an artifact beside `out`, train its codes and tables, and write them as `out`.

    Stopped, it goes on with the fit where that was, and trains from the start. What was trained is
    saved whole before any block is written; stopped later, all blocks come from that.

    Args:
        fit: Makes the artifact to begin with in a folder, or finds it there.
        out: Folder of the new artifact.
        start: What is tuned: model, geometry and narrowest width are its own.
        settings: Those of the fit, with its widest width.
        focus: The width of every block.
        config: How many steps.
        checkpoint: The unquantized model.
        progress: Where to report.
        overwrite: Replace what `out` was made with other settings.
        device: Where to train.
        recipe: File that says how the artifact is made, kept in it.

    Raises:
        ConfigError: The device cannot hold all routed experts, or the text is too short.
        PwError: See its subclasses.
    """
    assert settings.max_bits is not None
    text = read_texts(settings.calibration, config.distill_text, checkpoint)
    training = {"steps": config.distill, "rate": RATE, **text.record}
    manifest = start.manifest
    with ArtifactWriter.open(
        out, manifest.model, manifest.geometry, manifest.min_bits, settings.max_bits,
        start.lut_dtype,
        {**quantize_settings(settings, text.fit, focus), "distillation": training}, overwrite,
    ) as writer:  # fmt: skip
        folder, trained = Path(f"{out}.fitted"), Trained(out)
        if writer.complete:
            _clear(folder, trained)  # stopped between the last two steps
            return
        check_room(manifest.geometry.weights, device)
        inputs = [writer.manifest.stages[QUANTIZE].settings, manifest.model.files]
        saved = trained.there(inputs)
        fitted = Artifact.open(folder) if saved and folder.exists() else fit(folder)
        if saved:
            progress.note(f"distillation: trained already, in `{trained.path}`")
        else:
            trained.refuse_others(writer)
            trained.save(
                inputs, *_train(fitted, checkpoint, focus, config.distill, text, progress, device)
            )
        report = trained.report()
        trained.write(writer, fitted.manifest.widths)
        moments, table = fitted.manifest.stages["moments"], fitted.table("moments")
        writer.write_table(
            "moments", table.arrays, table.attrs, moments.settings, moments.inputs, moments.report
        )
        write_rest(writer, checkpoint, recipe, ShardIndex.open(checkpoint.path))
        divergence = {"before": report.before, "after": report.after}
        writer.publish({**fitted.manifest.stages[QUANTIZE].report, "divergence": divergence})
    _clear(folder, trained)


def _clear(folder: Path, trained: Trained) -> None:
    """Remove what the artifact was made of."""
    remove_tree(folder)
    trained.clear()


def _train(
    fitted: Artifact,
    checkpoint: Checkpoint,
    focus: Focus,
    steps: int,
    text: TrainingText,
    progress: Progress,
    device: torch.device,
) -> tuple[Blocks, Distilled]:
    count, dropped = len(text.windows), text.dropped
    progress.note(
        f"distillation: {steps} steps of {min(WINDOWS_PER_STEP, count)} windows of {count}; "
        f"{len(text.held_back)} held back"
        + (
            f"; {dropped} of --distill-text left out, which share text with those"
            if dropped
            else ""
        )
    )
    model = ObservedModel(checkpoint, str(device), dtype=torch.float32)
    blocks = Blocks(fitted, checkpoint, focus, device)
    training = Distillation(model, blocks, steps)
    before = training.divergence(text.held_back)
    training.run(text.windows, progress)
    report = Distilled(before, training.divergence(text.held_back))
    progress.note(
        f"distillation: divergence of windows held back {report.before:.6f} before, "
        f"{report.after:.6f} after, nats a token"
    )
    if report.after >= report.before:
        progress.note("distillation: no gain, codes and tables stay as they were fitted")
    return blocks, report
