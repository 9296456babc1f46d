"""The experts function that transformers calls, and what an experts module says about itself.

Registers `pw` with transformers' experts interface: every experts module of a model then calls the
function bound to it by `bind_experts`. Knows neither pages nor kernels, only what these may be
given before it is there and may give before it is added up (`pw_kernels.slots`).

Axes: T tokens, k experts a token, S routed rows, H hidden, I inner, E experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface

from pw.blocks import Module
from pw.errors import ModelError
from pw_kernels.slots import Choice, SlotResults

NAME = "pw"
# (slot, experts module, x [T, H], ids [T, k] int64, weights [T, k]) -> [T, H] in x.dtype
ExpertsFunction = Callable[[int, nn.Module, Tensor, Tensor, Tensor], Tensor]
Activation = str | Callable[[Tensor], Tensor]  # a name, or [S, 2I] -> [S, I]

_ACTIVATIONS = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
}


@runtime_checkable
class JoinedExperts(Protocol):
    """An `ExpertsFunction` whose launches take along what comes before and after them."""

    def joined(
        self,
        slot: int,
        _module: nn.Module,
        x: Tensor,
        ids: Tensor | Choice,
        weights: Tensor | None,
        *,
        summed: bool,
    ) -> Tensor | SlotResults:
        """As a call, with experts that may still have to be chosen.

        Args:
            slot: Of the MoE layer.
            _module: Its experts module.
            x: [T, H].
            ids: [T, k] int64, or a choice that is to be made, with its weights.
            weights: [T, k]; None with a choice.
            summed: Over the experts of a token; False: it may be left to the caller.
        """


def is_joined(function: object) -> TypeGuard[JoinedExperts]:
    """Whether an experts function takes more along than its call says."""
    kind: type = type(function)
    return _is_joined(kind)


@cache  # a protocol's check takes longer than some layer's own calls
def _is_joined(kind: type) -> bool:
    return issubclass(kind, JoinedExperts)


def _call_bound(module: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Experts function named `pw`: hand over to the function bound to this module."""
    result: Tensor = module.pw_experts(module.pw_slot, module, hidden, ids, weights)
    reduce = module.__dict__.get("pw_reduce")  # of a rank's part: see `pw.models.slicing`
    return result if reduce is None else reduce(result)


ExpertsInterface.register(NAME, _call_bound)


def is_experts(module: nn.Module) -> bool:
    """Whether transformers dispatches this module through its experts interface."""
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate")


def layer_of(name: str) -> int:
    """Model layer index in a module path: its first number (`model.layers.3.mlp` -> 3)."""
    match = re.search(r"\.(\d+)\.", f".{name}.")
    if match is None:
        raise ModelError(f"no layer index in the module path `{name}`")
    return int(match[1])


def expert_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Path and module of each experts module, by layer. Position in the list = slot."""
    found = [(name, module) for name, module in model.named_modules() if is_experts(module)]
    return sorted(found, key=lambda item: layer_of(item[0]))


def bind_experts(model: nn.Module, function: ExpertsFunction) -> None:
    """Let every experts module of `model` call `function(slot, module, x, ids, weights)`."""
    for slot, (_, module) in enumerate(expert_modules(model)):
        module.__dict__.update(pw_slot=slot, pw_experts=function)


def refusal(module: Any) -> str | None:
    """Why an experts module cannot be served, or None."""
    if not module.has_gate:
        return "its experts have no gate"
    if getattr(module, "has_post_expert_norm", False):
        return "its experts end in a norm"
    if not hasattr(module, "gate_up_proj") or not hasattr(module, "down_proj"):
        return "its experts are not stored as gate_up_proj and down_proj"
    return None


def gate_first(tensor: Tensor, module: Any, axis: int = 0) -> Tensor:
    """Gate rows before up rows along `axis`; turns an interleaved layout, keeps any other."""
    if module.is_concatenated:
        return tensor
    rows = tensor.movedim(axis, 0)
    return torch.cat((rows[::2], rows[1::2])).movedim(0, axis)


def to_module_layout(weights: Tensor, module: Any, block: Module) -> Tensor:
    """Weights of a layer's blocks [E, N, K] in the layout of its experts module's parameter."""
    if block == "gate_up" and not module.is_concatenated:
        gate, up = weights.chunk(2, dim=1)
        weights = torch.stack((gate, up), dim=2).flatten(1, 2)
    return weights.transpose(1, 2) if module.is_transposed else weights


def activation_name(module: nn.Module) -> str | None:
    """What the kernels call an activation; None if they do not know it."""
    return _ACTIVATIONS.get(type(module).__name__)


def activation_of(module: Any) -> Activation:
    """The gated activation of an experts module.

    Returns:
        "silu", "gelu" or "gelu_tanh" where it is act(gate) * up, else a callable
        [S, 2I] -> [S, I] over rows with the gate first.
    """
    apply_gate = type(module)._apply_gate
    if apply_gate.__name__ == "_default_apply_gate":
        name = activation_name(module.act_fn)
        if name is not None:
            return name
    if module.is_concatenated:
        return module._apply_gate  # type: ignore[no-any-return]

    def interleaved(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        result: Tensor = module._apply_gate(torch.stack((gate, up), dim=-1).flatten(-2))
        return result

    return interleaved
