"""Routed experts in plain torch, open to observation, for the offline stages.

They run in fp32 and differentiably, one expert after the other, so that a stage sees what each
block gets and gives, and can hook the gradients of a loss at both block outputs.

Axes: T tokens, k experts a token, n tokens routed to one expert, H hidden, I inner, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, silu

from pw.blocks import Module
from pw.models.experts import Activation


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

    def state(self) -> dict[str, Tensor]:
        """Everything measured so far, the tensors themselves: who writes to them restores it."""
        return {}


WeightSource = Callable[[int, int, Module, torch.device], Tensor]  # of (slot, expert, module)
BiasSource = Callable[[int, int, Module], Tensor | None]


class TorchExperts:
    """Experts function in plain torch; `observer` watches it where set.

    `weight` may be replaced, e.g. by weights at a lower width; a subclass may override `linear`.
    """

    def __init__(
        self, weight: WeightSource, bias: BiasSource, activations: list[Activation]
    ) -> None:
        self.observer: ExpertObserver | None = None
        self.weight = weight
        self.bias, self.activations = bias, activations

    def __call__(self, slot: int, module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Experts of one layer: [T, H], ids and weights [T, k] -> [T, H] in the dtype of `x`."""
        if self.observer is not None:
            self.observer.routed(slot, x, ids, weights)
        order = ids.flatten().argsort(stable=True)  # [T * k], by expert, then by token
        tokens = order // ids.shape[1]
        experts, counts = torch.unique(ids, return_counts=True)
        groups = (tokens, weights.float().flatten()[order], x.float().index_select(0, tokens))
        outputs = []
        for expert, *group in zip(
            experts.tolist(),
            *(torch.split(tensor, counts.tolist()) for tensor in groups),
            strict=True,
        ):
            if 0 <= expert < module.num_experts:
                call = self._run(slot, expert, *group)
                outputs.append(call.output * call.weights[:, None])
            else:
                outputs.append(torch.zeros_like(group[-1]))
        parts = torch.cat(outputs).index_select(0, order.argsort())
        return parts.view(*ids.shape, -1).sum(1).to(x.dtype)

    def _run(
        self, slot: int, expert: int, tokens: Tensor, weights: Tensor, inputs: Tensor
    ) -> ExpertCall:
        gate_up = self.linear(slot, expert, "gate_up", inputs)
        hidden = activate(gate_up, self.activations[slot])
        output = self.linear(slot, expert, "down", hidden)
        call = ExpertCall(slot, expert, tokens, weights, inputs, gate_up, hidden, output)
        if self.observer is not None:
            self.observer.expert(call)
        return call

    def linear(self, slot: int, expert: int, module: Module, x: Tensor) -> Tensor:
        """Output [n, N] of one block for its inputs [n, K], fp32."""
        bias = self.bias(slot, expert, module)
        weight = self.weight(slot, expert, module, x.device)
        result: Tensor = _Linear.apply(x, weight, None if bias is None else bias.float())  # type: ignore[no-untyped-call]
        if torch.is_grad_enabled() and not result.requires_grad:
            result.requires_grad_()  # the first MoE layer: nothing before it has a gradient
        return result


class _Linear(torch.autograd.Function):
    """Linear map in fp32 that keeps its weight in the weight's own dtype for the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[n, K], [N, K] and [N] or None -> [n, N]."""
        ctx.save_for_backward(weight)
        return linear(x, weight.float(), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        """Gradient [n, N] of the result -> that of `x` alone."""
        return gradients[0] @ ctx.saved_tensors[0].float(), None, None


def activate(gate_up: Tensor, activation: Activation) -> Tensor:
    """A gated activation of rows [n, 2I], gate first: [n, I]."""
    if callable(activation):
        return activation(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return silu(gate) * up
    return gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up
