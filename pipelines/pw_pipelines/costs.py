"""What a run of `quantize` cost, and the least that it could have taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pw.blocks import MODULES
from pw.config import QuantizeConfig
from pw.models.checkpoint import Checkpoint
from pw_pipelines.progress import Progress
from pw_pipelines.rates import seconds_per_operation
from pw_pipelines.refit import refit_operations


@dataclass(frozen=True)
class QuantizeCosts:
    """What a run of `quantize` cost; of a finished artifact, what it cost to see that."""

    seconds: dict[str, float]  # opening (digests included), reading, fitting, publishing
    bytes_read: int  # from the checkpoint
    bytes_least: int  # of the checkpoint, each once
    floor_seconds: float  # see `floor_seconds`


def floor_seconds(
    checkpoint: Checkpoint,
    tokens: int,
    widths: Sequence[int],
    config: QuantizeConfig,
    device: torch.device,
) -> float:
    """Least time of `quantize` here: its matrix products at the speed of one large product."""
    geometry, joint = checkpoint.geometry, config.codebook == "joint"
    routed = geometry.weights * geometry.top_k // geometry.experts
    operations = 2 * tokens * (routed + checkpoint.dense_weights_in_layers())
    if joint:
        squares = sum(geometry.shape(module).cols ** 2 for module in MODULES)
        operations += 2 * tokens * geometry.top_k * len(geometry.layers) * squares
        for shape in map(geometry.shape, MODULES):
            blocks = len(geometry.layers) * geometry.experts
            operations += refit_operations(blocks * shape.weights, shape.cols, len(widths))
    return operations * seconds_per_operation(device)


def print_costs(
    costs: QuantizeCosts, expected: int, quantized: int, progress: Progress, *, done: bool
) -> None:
    """Say what `quantize` took, or that there was nothing to do."""
    total = sum(costs.seconds.values())
    if done:
        progress.note(f"quantize: done already, {quantized} blocks; seen in {total:.1f} s")
    else:
        stages = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in costs.seconds.items())
        progress.note(f"quantize: {quantized} blocks in {total:.1f} s: {stages}")
    progress.note(f"audit: expected {expected} expert blocks, quantized {quantized}")
    if not done:
        progress.note(
            f"read {costs.bytes_read:,} bytes, {costs.bytes_read / costs.bytes_least:.1f} times "
            f"the checkpoint: for its digest, to fit, to copy what is not quantized; "
            f"floor: matrix products alone take {costs.floor_seconds:.1f} s here"
        )
