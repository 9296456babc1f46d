"""All experts of a layer on all tokens at once, for a GPU.

One call after the other keeps a GPU waiting: for Python, and for the count of each expert's tokens.
Where the experts are few and small it is faster to let each of them see every token.

Axes: T tokens, k experts a token, E experts, H hidden, I inner.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pw.blocks import Module
from pw.models.dense import BiasSource, TorchExperts, WeightSource, activate
from pw.models.experts import Activation


class TogetherExperts(TorchExperts):
    """`TorchExperts` in two products a layer, where nobody watches and no gradient is asked for.

    Args:
        weight: See `TorchExperts`.
        bias: See `TorchExperts`.
        activations: See `TorchExperts`.
        stacked: All weights [E, N, K] of a (slot, module).
    """

    def __init__(
        self,
        weight: WeightSource,
        bias: BiasSource,
        activations: list[Activation],
        stacked: Callable[[int, Module], Tensor],
    ) -> None:
        super().__init__(weight, bias, activations)
        self._stacked = stacked

    def __call__(self, slot: int, module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """See `TorchExperts`."""
        if self.observer is not None or torch.is_grad_enabled():
            return super().__call__(slot, module, x, ids, weights)
        experts = range(module.num_experts)
        shares = x.new_zeros(len(x), len(experts) + 1, dtype=torch.float32)
        ids = ids.where((ids >= 0) & (ids < len(experts)), len(experts))  # of no expert: the last
        shares = shares.scatter_add(1, ids, weights.float())[:, :-1].T  # [E, T]
        gate_up = x.float() @ self._stacked(slot, "gate_up").mT  # [E, T, 2I]
        if self.bias(slot, 0, "gate_up") is not None:
            gate_up = gate_up + self._biases(slot, experts, "gate_up")[:, None]
        hidden = activate(gate_up, self.activations[slot]) * shares[..., None]  # [E, T, I]
        output = (hidden @ self._stacked(slot, "down").mT).sum(0)  # [T, H]
        if self.bias(slot, 0, "down") is not None:
            output = output + shares.T @ self._biases(slot, experts, "down")
        return output.to(x.dtype)

    def _biases(self, slot: int, experts: range, module: Module) -> Tensor:
        """[E, N] fp32."""
        found = [self.bias(slot, expert, module) for expert in experts]
        return torch.stack([bias.float() for bias in found if bias is not None])
