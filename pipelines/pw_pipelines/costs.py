"""What a run of `quantize` cost, and the least that it could have taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from pw.blocks import MODULES, ExpertGeometry
from pw.config import QuantizeConfig, format_bytes
from pw.models.architecture import Architecture
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


class Shapes(Protocol):
    """What counting operations needs to know of a model."""

    @property
    def architecture(self) -> Architecture:
        """Its definition."""
        ...

    @property
    def geometry(self) -> ExpertGeometry:
        """Of the routed experts."""
        ...

    def dense_weights_in_layers(self) -> int:
        """Number of weights in the decoder layers that are not routed experts."""
        ...


def forward_operations(model: Shapes, tokens: int) -> int:
    """Of the products with weights when all layers read so many tokens once, head left out."""
    dense = model.dense_weights_in_layers()
    return 2 * tokens * (_routed_weights(model) + dense)


def sensitivity_operations(model: Shapes, tokens: int, widths: int) -> int:
    """Of the products that gradients at all block outputs take, and errors at all widths."""
    config = model.architecture.config
    head = int(config.vocab_size) * int(config.hidden_size)
    errors = _routed_weights(model) * widths
    return 2 * forward_operations(model, tokens) + 2 * tokens * (2 * head + errors)


def _routed_weights(model: Shapes) -> int:
    """Weights of the experts that one token visits, in all layers."""
    geometry = model.geometry
    return geometry.weights * geometry.top_k // geometry.experts


def floor_seconds(
    checkpoint: Checkpoint,
    tokens: int,
    widths: Sequence[int],
    config: QuantizeConfig,
    device: torch.device,
) -> float:
    """Least time of `quantize` here: its matrix products at the speed of one large product."""
    geometry = checkpoint.geometry
    operations = forward_operations(checkpoint, tokens)
    if config.codebook == "joint":
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
            f"{_read(costs.bytes_read, costs.bytes_least)}: for its digest, to fit, to copy what "
            f"is not quantized; {_floor(costs.floor_seconds)}"
        )


def print_reading(
    stage: str,
    seconds: float,
    checkpoint: Checkpoint,
    operations: int,
    device: torch.device,
    progress: Progress,
) -> None:
    """Say what a stage took that reads text, from opening to its table."""
    floor = operations * seconds_per_operation(device)
    read = _read(checkpoint.shards.bytes_read, checkpoint.shards.nbytes)
    progress.note(f"{stage}: {seconds:.1f} s; {read}; {_floor(floor)}")


def _read(count: int, least: int) -> str:
    return f"read {format_bytes(count)}, {count / least:.1f} times the checkpoint"


def _floor(seconds: float) -> str:
    return f"floor: matrix products alone take {seconds:.1f} s here"
