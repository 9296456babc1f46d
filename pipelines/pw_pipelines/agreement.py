"""Do the scores rank blocks as the model itself does? Scores against measured divergence.

A sample of blocks is lowered to the narrowest width, one at a time, and the divergence KL of the
next-token distribution from the unquantized model's is measured on a few windows. KL, not the rise
of the loss: over so few tokens the latter is mostly noise, and cannot even keep its sign.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pw.blocks import MODULES
from pw.models.dequantized import DequantizedBlocks
from pw_pipelines.observation import ObservedModel
from pw_pipelines.progress import Progress
from pw_pipelines.steps import trim

_BLOCKS = 24
_TOKENS = 2048


@dataclass(frozen=True)
class Agreement:
    """How scores rank a sample of blocks, compared with what was measured."""

    bits: int
    blocks: int
    spearman: dict[str, float]  # metric -> rank correlation with the measured divergence
    keys: tuple[str, ...]  # which blocks
    divergence: tuple[float, ...]  # nats per token
    predicted: tuple[float, ...]  # score `output_gradient` of the same blocks


def measure_agreement(
    model: ObservedModel,
    blocks: DequantizedBlocks,
    scores: Mapping[str, NDArray[np.float64]],  # metric -> [L, E, M, W]
    windows: Tensor,
    seed: int,
    progress: Progress,
) -> Agreement:
    """Measure a random sample of blocks at the narrowest width, on the first windows [P, S]."""
    geometry = model.geometry
    count = min(_BLOCKS, geometry.blocks)
    drawn = np.random.default_rng(seed).choice(geometry.blocks, count, replace=False)
    keys = [geometry.key(int(index)) for index in np.sort(drawn)]
    text = windows[: max(1, _TOKENS // windows.shape[1])]
    bits = blocks.widths[0]
    trim()
    with progress.stage("agreement", model.layers, "layers") as advance:
        changes = {key: partial(blocks.weight, key, bits) for key in keys}
        reference, changed = model.branches(text, changes, advance)
        measured = _divergences(model, text, reference, [changed[key] for key in keys])
    places = [(geometry.slot(k.layer), k.expert, MODULES.index(k.module)) for k in keys]
    chosen = {name: np.array([values[p][0] for p in places]) for name, values in scores.items()}
    return Agreement(
        bits=bits,
        blocks=count,
        spearman={name: spearman(values, np.array(measured)) for name, values in chosen.items()},
        keys=tuple(str(key) for key in keys),
        divergence=tuple(measured),
        predicted=tuple(chosen["output_gradient"].tolist()),
    )


def divergence(reference: Tensor, logits: Tensor, shares: Tensor | None = None) -> float:
    """Mean KL in nats of softmax(logits) from the reference log-probabilities, [B, S, vocab].

    `shares` are the reference probabilities, where many are compared with the same.
    """
    other = logits.log_softmax(-1)
    gap = torch.sub(reference, other, out=other)
    return float(gap.mul_(reference.exp() if shares is None else shares).sum(-1).double().mean())


def spearman(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Rank correlation; 0 where it is not defined (fewer than two values)."""
    if len(a) < 2:
        return 0.0
    first, second = (np.argsort(np.argsort(values)).astype(np.float64) for values in (a, b))
    return float(np.corrcoef(first, second)[0, 1])


def _divergences(
    model: ObservedModel, text: Tensor, reference: Tensor, others: Sequence[Tensor]
) -> list[float]:
    """`divergence` of outputs of the last layer [B, S, H] from one of them, a part at a time."""
    totals = [0.0] * len(others)
    parts = [model.logits(text, states) for states in others]
    for logits in model.logits(text, reference):
        expected = logits.log_softmax(-1)
        shares = expected.exp()
        for index, part in enumerate(parts):
            totals[index] += divergence(expected, next(part), shares) * expected.shape[1]
    return [total / text.shape[1] for total in totals]
