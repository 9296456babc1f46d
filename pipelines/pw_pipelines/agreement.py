"""Do the scores rank blocks as the model itself does? Scores against measured divergence.

A sample of blocks is lowered to the narrowest width, one at a time, and the divergence KL of the
next-token distribution from the unquantized model's is measured on a few windows. KL, not the rise
of the loss: over so few tokens the latter is mostly noise, and cannot even keep its sign.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pw.blocks import MODULES, BlockKey
from pw_pipelines.dequantized import DequantizedBlocks
from pw_pipelines.observation import ObservedModel, Weights
from pw_pipelines.progress import Progress

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
    reference = model.logits(text).log_softmax(-1)
    measured = []
    with progress.stage("agreement", count, "blocks") as advance:
        for key in keys:
            lowered = _lowered(model, blocks, key, bits)
            measured.append(divergence(reference, model.logits(text, weights=lowered)))
            advance(1)
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


def divergence(reference: Tensor, logits: Tensor) -> float:
    """Mean KL in nats of softmax(logits) from the reference log-probabilities, [B, S, vocab]."""
    other = logits.log_softmax(-1)
    return float((reference.exp() * (reference - other)).sum(-1).double().mean())


def spearman(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Rank correlation; 0 where it is not defined (fewer than two values)."""
    if len(a) < 2:
        return 0.0
    first, second = (np.argsort(np.argsort(values)).astype(np.float64) for values in (a, b))
    return float(np.corrcoef(first, second)[0, 1])


def _lowered(
    model: ObservedModel, blocks: DequantizedBlocks, lowered: BlockKey, bits: int
) -> Weights:
    """Weights of the model with one block at a width."""
    weight = blocks.weight(lowered, bits)
    return lambda key: weight if key == lowered else model.weight(key)
