"""Random weights in the shape of a config, made in memory: for load tests without a checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pw.blocks import ExpertGeometry
from pw.models.architecture import Architecture
from pw.models.attention import NAME as ATTENTION
from pw.models.experts import NAME as EXPERTS
from pw.models.experts import expert_modules
from pw.models.skeleton import Skeleton, build, finish
from pw.models.slicing import DensePart

STANDARD_DEVIATION = 0.02  # of random weights, as models are initialized


def random_skeleton(
    architecture: Architecture,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    part: DensePart | None = None,
) -> Skeleton:
    """Dense weights made on the device: matrices are random, vectors neutral.

    With a part, what it keeps of the same weights.
    """
    model = build(architecture, dtype, attention=ATTENTION, experts=EXPERTS)
    generator = torch.Generator(device).manual_seed(seed)
    experts = {name for name, _ in expert_modules(model)}
    for name, module in model.named_modules():
        for leaf, parameter in module._parameters.items():
            made_elsewhere = name in experts and leaf.endswith("_proj")
            if parameter is not None and parameter.is_meta and not made_elsewhere:
                value = random_weight(leaf, parameter, generator)
                if part is not None:
                    value = part.cut(f"{name}.{leaf}", value)
                module._parameters[leaf] = nn.Parameter(value, requires_grad=False)
        for leaf, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[leaf] = buffer.to(device)
    model.tie_weights()
    return finish(model, architecture, dtype, device, part)


def random_weight(name: str, like: Tensor, generator: torch.Generator) -> Tensor:
    """A matrix is random, a vector neutral: 0 for a bias, else 1."""
    made = torch.empty(like.shape, dtype=like.dtype, device=generator.device)
    if like.dim() < 2:
        return made.fill_(0.0 if name.endswith("bias") else 1.0)
    return made.normal_(0.0, STANDARD_DEVIATION, generator=generator)


def random_experts(
    geometry: ExpertGeometry, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> list[tuple[Tensor, Tensor]]:
    """Unquantized experts of every MoE layer: [E, 2I, H] and [E, H, I]."""
    generator = torch.Generator(device).manual_seed(seed)

    def make(rows: int, cols: int) -> Tensor:
        made = torch.empty(geometry.experts, rows, cols, dtype=dtype, device=device)
        return made.normal_(0.0, STANDARD_DEVIATION, generator=generator)

    up, down = geometry.gate_up, geometry.down
    return [(make(up.rows, up.cols), make(down.rows, down.cols)) for _ in geometry.layers]
