"""Codes and tables of planned widths, trained on the divergence from the unquantized model.

The refit (`pw_pipelines.refit`) sees one block at a time. Here all blocks stand at the widths they
were fitted for, and what counts is KL(unquantized, quantized) of the next token over calibration
text. Every weight has a latent value that moves by Adam; its code is the level nearest to it, and
gradients pass through this rounding (straight-through; PV-tuning, arXiv 2405.14852, does so for
codes, too). Levels move with them. Dense weights stay the checkpoint's.

Only codes and tables of the planned width are trained. A weight whose code there has not changed
keeps the bits below; else it takes what is nearest. Tables of other widths stay.

Axes: E experts, N rows, K columns, P rows of a table that rows share, C levels, W windows, S
tokens.
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
from pw_kernels.bitplane import (
    TILE_WORDS,
    bit_reverse_lut,
    pack_planes,
    plane_bytes,
    unpack_planes,
)
from pw_pipelines.calibration import calibration_set
from pw_pipelines.focus import Focus
from pw_pipelines.gpu_memory import free_bytes
from pw_pipelines.observation import CPU, ObservedModel, batches
from pw_pipelines.progress import Progress
from pw_pipelines.quantize import quantize_settings, write_rest
from pw_pipelines.sharing import period
from pw_pipelines.source import vocabulary_of

WINDOWS_PER_STEP = 16
HELD_BACK = 32  # windows that are not trained on, at most a tenth of all
RATE = 0.003  # Adam's, in distances between levels
_WARM_UP = 0.05  # of all steps; then the rate falls as half a cosine
_BETAS = (0.9, 0.99)
_TOWARD = 0.9  # of the way from its level to the weight on which a latent value starts
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


class Blocks:
    """All blocks of an artifact at the widths of a focus, as functions of what is trained.

    Args:
        artifact: Whose codes and tables are the start.
        checkpoint: The unquantized weights.
        focus: The widths.
        device: Where they are.
    """

    def __init__(
        self, artifact: Artifact, checkpoint: Checkpoint, focus: Focus, device: torch.device
    ) -> None:
        self.artifact, self.device, self.most = artifact, device, artifact.max_bits
        self.keys = list(artifact.geometry.keys())
        self._focus = focus
        self.latents: dict[BlockKey, Tensor] = {}  # [P, N / P * K]
        self.tables: dict[BlockKey, Tensor] = {}  # [P, C], natural order
        self._shapes = {m: artifact.geometry.shape(m) for m in MODULES}
        gaps = {}
        for key in self.keys:
            codes, table = self._codes(key), self._table(key)
            weight = checkpoint.expert_weight(key).to(device, torch.float32)
            tied = self._tied(weight, table)
            start = self._tied((codes >> (self.most - self.bits(key))).long(), table)
            levels, order = table.sort(1)
            place = order.argsort(1).gather(1, start)
            edges = torch.nn.functional.pad((levels[:, 1:] + levels[:, :-1]) / 2, (1, 1))
            edges[:, 0], edges[:, -1] = -torch.inf, torch.inf
            inside = tied.clamp(edges.gather(1, place), edges.gather(1, place + 1))
            own = table.gather(1, start)
            gap = (levels[:, -1] - levels[:, 0]).mean() / (levels.shape[1] - 1)
            toward = (inside - own).clamp(-2 * gap, 2 * gap)
            self.latents[key] = (own + _TOWARD * toward).requires_grad_()
            self.tables[key] = table.requires_grad_()
            gaps[key] = max(float(gap), 1e-12)
        self.groups = [
            {"params": [values[key]], "lr": RATE * gaps[key], "top": RATE * gaps[key]}
            for values in (self.latents, self.tables)
            for key in self.keys
        ]
        self._now: dict[BlockKey, Tensor] = {}

    def bits(self, key: BlockKey) -> int:
        """Width of a block."""
        return self._focus.widths[key.layer, key.module][key.expert]

    def refresh(self) -> None:
        """Compute the weights anew from what is trained."""
        self._now = {key: self._weight(key) for key in self.keys}

    def weight(self, key: BlockKey) -> Tensor:
        """[N, K] as of the last `refresh`."""
        return self._now[key].detach()

    def backward(self, gradients: dict[BlockKey, Tensor]) -> None:
        """Hand gradients at the weights [N, K] on to latents and tables."""
        keys = list(gradients)
        torch.autograd.backward([self._now[key] for key in keys], [gradients[key] for key in keys])

    @torch.no_grad()
    def codes(self, key: BlockKey, *, changed: bool = True) -> Tensor:
        """[N, K] uint8 of all widths, natural order; as they were unless `changed`."""
        below = self.most - self.bits(key)
        kept = self._codes(key)
        if not changed:
            return kept
        table, latent = self._rounded(self.tables[key]), self.latents[key]
        found, before = self._nearest(latent, table), self._tied(kept.long() >> below, table)
        found = torch.where(table.gather(1, found) == table.gather(1, before), before, found)
        top, same = self._untied(found, key), self._untied(found == before, key)
        wide = self._lut(key, self.most)
        target, first = self._untied(latent, key), top << below
        apart = torch.stack([
            (wide.gather(1, first + child) - target).abs() for child in range(1 << below)
        ])  # fmt: skip
        return torch.where(same, kept, first + apart.argmin(0)).to(torch.uint8)

    @torch.no_grad()
    def lut(self, key: BlockKey, bits: int, *, changed: bool = True) -> Tensor:
        """Table [N, 2^bits] in natural order; as it was unless `changed`."""
        if bits != self.bits(key) or not changed:
            return self._lut(key, bits)
        table = self._rounded(self.tables[key])
        rows = self._shapes[key.module].rows
        return table.repeat(rows // len(table), 1)

    def _weight(self, key: BlockKey) -> Tensor:
        latent, table = self.latents[key], self.tables[key]
        rounded = table + (self._rounded(table) - table).detach()
        found = self._nearest(latent.detach(), rounded.detach())
        level = rounded.gather(1, found)
        return self._untied(level + (latent - latent.detach()), key)

    def _nearest(self, latent: Tensor, table: Tensor) -> Tensor:
        """Entries [P, n] of the table nearest to latent values."""
        levels, order = table.sort(1)
        middle = (levels[:, 1:] + levels[:, :-1]) / 2
        return order.gather(1, torch.searchsorted(middle, latent))

    def _rounded(self, table: Tensor) -> Tensor:
        return table.detach().to(self.artifact.lut_dtype).float()

    def _tied(self, values: Tensor, table: Tensor) -> Tensor:
        """[N, K] -> [P, N / P * K]: rows that share a table of P rows side by side."""
        apart = len(table)
        return values.view(-1, apart, values.shape[1]).transpose(0, 1).reshape(apart, -1)

    def _untied(self, values: Tensor, key: BlockKey) -> Tensor:
        shape = self._shapes[key.module]
        return values.view(len(values), -1, shape.cols).transpose(0, 1).reshape(shape.rows, -1)

    def _codes(self, key: BlockKey) -> Tensor:
        shape = self.artifact.geometry.shape(key.module)
        data = np.empty(self.most * plane_bytes(shape.rows, shape.cols), np.uint8)
        self.artifact.read_planes(key, 0, self.most, data)
        words = torch.from_numpy(data.view(np.int32)).view(self.most, -1, TILE_WORDS)
        return unpack_planes(words.to(self.device), shape.rows, shape.cols)

    def _lut(self, key: BlockKey, bits: int) -> Tensor:
        """[N, 2^bits] float32 in natural order, as the artifact has it."""
        rows = self.artifact.geometry.shape(key.module).rows
        lut = self.artifact.lut(key, bits)[:rows].to(self.device)
        return bit_reverse_lut(lut).float()

    def _table(self, key: BlockKey) -> Tensor:
        """[P, C] of the planned width."""
        whole, bits = self._lut(key, self.bits(key)), self.bits(key)
        if self._focus.table_bytes is None:
            return whole
        return whole[: period(len(whole), bits, self._focus.table_bytes)].clone()


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
) -> tuple[str, Tensor, Tensor]:
    """Windows [W, S] to train on and windows held back.

    All windows of the calibration text, not only those that blocks were fitted on, and those of
    other text if there is any. Held back are some of the calibration text's last ones.

    Returns:
        Digest of both; windows to train on; windows held back.

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
    return digests, torch.cat(parts), own.windows[-count:]


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

    Stopped, it goes on with the fit where that was, and trains from the start.

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
    calibration, tokenizer = settings.calibration, load_tokenizer(checkpoint.path)
    samples = calibration_set(calibration, tokenizer, vocabulary_of(checkpoint))
    digest, windows, held_back = texts(calibration, config.text, checkpoint)
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
