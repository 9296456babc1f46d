"""The whole model for offline stages, with its routed experts open to observation.

Experts run in plain torch, in fp32 and differentiably, one expert after the other, so that a stage
sees what each block gets and gives, and can hook the gradients of a loss at both block outputs.

Axes: T tokens, k experts a token, n tokens routed to one expert, H hidden, I inner, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, silu

from pw.blocks import MODULES, BlockKey, Module
from pw.errors import ModelError
from pw.models.checkpoint import Checkpoint
from pw.models.experts import NAME as EXPERTS
from pw.models.experts import Activation, activation_of, bind_experts, expert_modules, gate_first
from pw.models.skeleton import build, load_dense_tensors


@dataclass(frozen=True, slots=True)
class ExpertCall:
    """One expert's share of one forward pass, all in fp32. Rows are its n routed tokens.

    With gradients enabled, `gate_up` and `output` require grad: `gate_up.register_hook(f)` gives
    the loss gradient at the block's output (that at `output` contains the router weight).
    """

    slot: int  # position of the MoE layer
    expert: int
    tokens: Tensor  # [n] int64, row of each token in the flattened batch
    weights: Tensor  # [n] router weight
    inputs: Tensor  # [n, H]
    gate_up: Tensor  # [n, 2I] output of the gate_up block, gate first
    hidden: Tensor  # [n, I] input of the down block
    output: Tensor  # [n, H] output of the down block, before the router weight


class ExpertObserver:
    """What a stage watches; override what it needs. Observers must not change the tensors."""

    def routed(self, slot: int, inputs: Tensor, ids: Tensor, weights: Tensor) -> None:
        """Once per MoE layer, first: inputs [T, H], ids [T, k] int64, weights [T, k]."""

    def expert(self, call: ExpertCall) -> None:
        """Once per expert that has tokens, experts ascending."""


WeightSource = Callable[[int, int, Module, torch.device], Tensor]  # of (slot, expert, module)
BiasSource = Callable[[int, int, Module], Tensor | None]


class TorchExperts:
    """Experts function in plain torch; `observer` watches it where set.

    `weight` may be replaced, e.g. by weights at a lower width.
    """

    def __init__(
        self, weight: WeightSource, bias: BiasSource, activations: list[Activation]
    ) -> None:
        self.observer: ExpertObserver | None = None
        self.weight = weight
        self._bias, self._activations = bias, activations

    def __call__(self, slot: int, module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Experts of one layer: [T, H], ids and weights [T, k] -> [T, H] in the dtype of `x`."""
        if self.observer is not None:
            self.observer.routed(slot, x, ids, weights)
        inputs, scales = x.float(), weights.float()
        parts = torch.zeros(*ids.shape, x.shape[1], device=x.device)  # [T, k, H]
        for expert in torch.unique(ids).tolist():
            if 0 <= expert < module.num_experts:
                tokens, slots = (ids == expert).nonzero(as_tuple=True)
                call = self._run(slot, expert, tokens, scales[tokens, slots], inputs[tokens])
                parts = parts.index_put((tokens, slots), call.output * call.weights[:, None])
        return parts.sum(1).to(x.dtype)

    def _run(
        self, slot: int, expert: int, tokens: Tensor, weights: Tensor, inputs: Tensor
    ) -> ExpertCall:
        gate_up = self._linear(slot, expert, "gate_up", inputs)
        hidden = _activate(gate_up, self._activations[slot])
        output = self._linear(slot, expert, "down", hidden)
        call = ExpertCall(slot, expert, tokens, weights, inputs, gate_up, hidden, output)
        if self.observer is not None:
            self.observer.expert(call)
        return call

    def _linear(self, slot: int, expert: int, module: Module, x: Tensor) -> Tensor:
        bias = self._bias(slot, expert, module)
        weight = self.weight(slot, expert, module, x.device).float()
        result = linear(x, weight, None if bias is None else bias.float())
        if torch.is_grad_enabled() and not result.requires_grad:
            result.requires_grad_()  # the first MoE layer: nothing before it has a gradient
        return result


def _activate(gate_up: Tensor, activation: Activation) -> Tensor:
    """[n, 2I] -> [n, I]."""
    if callable(activation):
        return activation(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return silu(gate) * up
    return gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


def torch_experts(
    model: nn.Module, checkpoint: Checkpoint, dtype: torch.dtype, *, stream: bool = False
) -> TorchExperts:
    """The experts of `checkpoint` as a function to bind to `model`; see `load_dense`."""
    modules = [module for _, module in expert_modules(model)]
    biases = [_bias_tables(module) for module in modules]
    layers = checkpoint.geometry.layers
    held: list[dict[Module, Tensor]] = []
    if not stream:
        device = next(p.device for p in model.parameters() if not p.is_meta)
        for module, layer in zip(modules, layers, strict=True):
            held.append(_load_experts(module, layer, checkpoint, dtype, device))

    def weight(slot: int, expert: int, block: Module, device: torch.device) -> Tensor:
        if held:
            return held[slot][block][expert]
        key = BlockKey(layers[slot], expert, block)
        return checkpoint.expert_weight(key).to(device, dtype)

    def bias(slot: int, expert: int, block: Module) -> Tensor | None:
        table = biases[slot]
        return None if table is None else table[block][expert]

    return TorchExperts(weight, bias, [activation_of(module) for module in modules])


def load_dense(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    stream: bool = False,
) -> nn.Module:
    """The full transformers model for offline stages, in eval mode, parameters without gradients.

    Args:
        checkpoint: A checkpoint with experts.
        dtype: Of the dense weights and of the experts; expert arithmetic is fp32 in any case.
        device: Where it runs.
        stream: Read the experts of a layer from disk at each call instead of holding them. For
            forward passes over large batches of a model that does not fit in memory.

    Raises:
        ModelError: The checkpoint holds no experts.
    """
    if not checkpoint.has_experts:
        raise ModelError(
            f"no routed experts in `{checkpoint.path}`",
            "name the original checkpoint: an artifact holds its experts as bit-planes",
        )
    definition: Any = checkpoint.architecture.meta
    attention = "sdpa" if definition._supports_sdpa else "eager"
    model = build(checkpoint, dtype, attention=attention, experts=EXPERTS)
    load_dense_tensors(model, checkpoint, dtype, torch.device(device))
    bind_experts(model, torch_experts(model, checkpoint, dtype, stream=stream))
    result: nn.Module = model
    return result


def observe_experts(model: nn.Module, observer: ExpertObserver | None) -> None:
    """Let `observer` watch the experts of a model from `load_dense`; None ends it."""
    for _, module in expert_modules(model):
        function: Any = module.pw_experts
        function.observer = observer


def _load_experts(
    module: Any, layer: int, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
) -> dict[Module, Tensor]:
    """Fill an experts module; its parameters become [E, N, K], gate first, whatever they were."""
    geometry = checkpoint.geometry
    tables: dict[Module, Tensor] = {}
    for block in MODULES:
        shape = geometry.shape(block)
        table = torch.empty(geometry.experts, shape.rows, shape.cols, dtype=dtype, device=device)
        for expert in range(geometry.experts):
            table[expert] = checkpoint.expert_weight(BlockKey(layer, expert, block))
        module._parameters[f"{block}_proj"] = nn.Parameter(table, requires_grad=False)
        tables[block] = table
    return tables


def _bias_tables(module: Any) -> dict[Module, Tensor] | None:
    """Biases [E, N] of an experts module, rows as in the blocks."""
    if not module.has_bias:
        return None
    gate_up = gate_first(module.gate_up_proj_bias, module, axis=1)
    return {"gate_up": gate_up, "down": module.down_proj_bias}
