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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pw.blocks import MODULES, BlockKey
from pw.config import CalibrationConfig, QuantizeConfig, TuneConfig, format_bytes
from pw.errors import ConfigError
from pw.models.checkpoint import Checkpoint
from pw.models.dense import ExpertCall, ExpertObserver
from pw.models.shards import ShardIndex
from pw.models.tokenizer import load_tokenizer
from pw.store.artifact import QUANTIZE, Artifact
from pw.store.files import remove_tree
from pw.store.writer import ArtifactWriter
from pw_kernels.bitplane import bit_reverse_lut, pack_planes
from pw_pipelines.calibration import CalibrationSet, calibration_set
from pw_pipelines.focus import Focus
from pw_pipelines.gpu_memory import free_bytes
from pw_pipelines.latents import RATE, Blocks
from pw_pipelines.observation import CPU, ObservedModel, batches
from pw_pipelines.progress import Progress
from pw_pipelines.quantize import quantize_settings, write_rest
from pw_pipelines.source import vocabulary_of

WINDOWS_PER_STEP = 16
HELD_BACK = 32  # windows that are not trained on, at most a tenth of all
_WARM_UP = 0.05  # of all steps; then the rate falls as half a cosine
_BETAS = (0.9, 0.99)
_BYTES = (
    40  # a weight: latent, gradient, two moments, level, its gradient, its place (int64), spare
)
_SEED = 0
_EVERY = 1 << 30  # windows: all that a text gives


@dataclass(frozen=True)
class Distilled:
    """What the training gave, on windows that it did not see; nats a token."""

    before: float
    after: float


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


def texts(
    calibration: CalibrationConfig, more: str, checkpoint: Checkpoint
) -> tuple[CalibrationSet, str, Tensor, Tensor]:
    """Windows [W, S] to train on and windows held back.

    All windows of the calibration text, not only those that blocks were fitted on, and those of
    other text if there is any. Held back are some of the calibration text's last ones.

    Returns:
        Windows that blocks are fitted on; digest of all; windows to train on; windows held back.

    Raises:
        ConfigError: The text is one window.
    """
    tokenizer, vocabulary = load_tokenizer(checkpoint.path), vocabulary_of(checkpoint)
    every = replace(calibration, nsamples=_EVERY)
    own = calibration_set(every, tokenizer, vocabulary)
    if len(own.windows) < 2:
        raise ConfigError(
            f"calibration text gives one window, distillation takes two: `{every.dataset}`",
            "use more text or a smaller --seqlen",
        )
    count = min(HELD_BACK, max(1, len(own.windows) // 10))
    parts, digests = [own.windows[:-count]], own.digest
    if more:
        others = calibration_set(replace(every, dataset=more), tokenizer, vocabulary)
        parts, digests = [*parts, others.windows], f"{digests}+{others.digest}"
    drawn = calibration.nsamples  # a draw of more windows begins with those of one of fewer
    fit = CalibrationSet(own.windows[:drawn], own.documents[:drawn], own.available)
    return fit, digests, torch.cat(parts), own.windows[-count:]


def check_room(weights: int, device: torch.device) -> None:
    """Refuse a model whose routed experts cannot be trained at once.

    Raises:
        ConfigError: The device has too little memory.
    """
    needed = distill_bytes(weights)
    free = free_bytes(device) if device.type == "cuda" else _host_bytes()
    if needed > free:
        raise ConfigError(
            f"distillation takes {format_bytes(needed)} for all routed experts at once, "
            f"{format_bytes(free)} are free",
            "leave --distill out, or use a device with more memory",
        )


def _host_bytes() -> int:
    for line in Path("/proc/meminfo").read_text("ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError("the system does not say how much memory is free")


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

    Stopped, it goes on with the fit where that was, and trains from the start. Blocks that an
    earlier run has written stay: on a CPU they are the same, on a GPU those of its own training.

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
    samples, digest, windows, held_back = texts(settings.calibration, config.text, checkpoint)
    trained = {"steps": config.distill, "rate": RATE, "windows": digest}
    manifest = start.manifest
    with ArtifactWriter.open(
        out, manifest.model, manifest.geometry, manifest.min_bits, settings.max_bits,
        start.lut_dtype,
        {**quantize_settings(settings, samples, focus), "distillation": trained}, overwrite,
    ) as writer:  # fmt: skip
        if writer.complete:
            return
        check_room(manifest.geometry.weights, device)
        folder = Path(f"{out}.fitted")
        fitted = fit(folder)
        progress.note(
            f"distillation: {config.distill} steps of {min(WINDOWS_PER_STEP, len(windows))} windows"
            f" of {len(windows)}; {len(held_back)} held back"
        )
        blocks, report = _train(fitted, checkpoint, focus, config.distill, windows, held_back,
                                progress, device)  # fmt: skip
        progress.note(
            f"distillation: divergence of windows held back {report.before:.6f} before, "
            f"{report.after:.6f} after, nats a token"
        )
        if report.after >= report.before:
            progress.note("distillation: no gain, codes and tables stay as they were fitted")
        _write(writer, fitted, blocks, changed=report.after < report.before)
        moments, table = fitted.manifest.stages["moments"], fitted.table("moments")
        writer.write_table(
            "moments", table.arrays, table.attrs, moments.settings, moments.inputs, moments.report
        )
        write_rest(writer, checkpoint, recipe, ShardIndex.open(checkpoint.path))
        divergence = {"before": report.before, "after": report.after}
        writer.publish({**fitted.manifest.stages[QUANTIZE].report, "divergence": divergence})
    remove_tree(folder)


def _train(
    fitted: Artifact,
    checkpoint: Checkpoint,
    focus: Focus,
    steps: int,
    windows: Tensor,
    held_back: Tensor,
    progress: Progress,
    device: torch.device,
) -> tuple[Blocks, Distilled]:
    model = ObservedModel(checkpoint, str(device), dtype=torch.float32)
    blocks = Blocks(fitted, checkpoint, focus, device)
    training = Distillation(model, blocks, steps)
    before = training.divergence(held_back)
    training.run(windows, progress)
    return blocks, Distilled(before, training.divergence(held_back))


def _write(writer: ArtifactWriter, fitted: Artifact, blocks: Blocks, *, changed: bool) -> None:
    """All planes and LUTs; those of `fitted` where nothing was gained."""
    geometry, widths = fitted.geometry, fitted.manifest.widths
    for layer in geometry.layers:
        for module in MODULES:
            if writer.done(layer, module):
                continue
            keys = [BlockKey(layer, expert, module) for expert in range(geometry.experts)]
            codes = torch.stack([blocks.codes(key, changed=changed).cpu() for key in keys])
            luts = {
                bits: torch.stack([blocks.lut(key, bits, changed=changed).cpu() for key in keys])
                for bits in widths
            }
            writer.write_blocks(
                layer, module, pack_planes(codes, fitted.max_bits),
                {b: bit_reverse_lut(lut.to(fitted.lut_dtype)) for b, lut in luts.items()},
            )  # fmt: skip
