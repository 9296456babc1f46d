"""Linear maps of one input become one product, RMS norms one kernel: for any module tree.

Which maps read the same input is not guessed from names: a probe shows which modules are handed
the same tensor, one right after the other or not (q, k, v; gate, up; gate, up and the gate of a
shared expert; the two down-projections of MLA). Their weights are put together and become views
of the whole, so that names stay and no byte is held twice. The modules' own code goes on calling
them: the first call computes the product, the others take their part of it. Few rows, as in a
decode step, are multiplied by the kernel of `pw_kernels.products`.

A rewrite is kept only if the model gives the same logits as before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pw.errors import ModelError
from pw.models.experts import layer_of
from pw.models.probing import TOLERANCE, Forward, probe_logits, why_not
from pw_kernels import products, step

_log = logging.getLogger(__name__)
_ROW_MULTIPLE = 8  # on a GPU: rows of a product whose stores are then aligned to 16 bytes


def concatenate(modules: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
    """One weight [N, K] and bias [N] for linear maps, whose own become views of it.

    On a GPU rows of zeros follow, up to a multiple of 8.
    """
    sizes = [module.weight.shape[0] for module in modules]
    first = max((module.weight for module in modules), key=len)
    padding = -sum(sizes) % _ROW_MULTIPLE if first.device.type == "cuda" else 0
    rows = [module.weight for module in modules]
    if padding:
        rows.append(first.new_zeros(padding, first.shape[1]))
    if first.stride(0) == 1 != len(first):  # stored by column, and so shall be the whole
        weight = torch.cat([part.t() for part in rows], dim=1).t()
    else:
        weight = torch.cat(rows)
    _become_views(modules, "weight", weight, sizes)
    if modules[0].bias is None:
        return weight, None
    biases = [module.bias for module in modules]
    bias = torch.cat([*biases, first.new_zeros(padding)] if padding else biases)
    _become_views(modules, "bias", bias, sizes)
    return weight, bias


def _become_views(modules: Sequence[Any], leaf: str, whole: Tensor, sizes: list[int]) -> None:
    start = 0
    for module, size in zip(modules, sizes, strict=True):
        part = whole[start : start + size]
        setattr(module, leaf, nn.Parameter(part, requires_grad=False))
        start += size


class JointProduct:
    """Linear maps that are handed the same tensor. The first of them computes for all.

    What it computed is let go with the last part, so that nothing outlives a forward pass.
    """

    def __init__(self, modules: Sequence[Any]) -> None:
        self._modules = modules
        self._sizes = [module.weight.shape[0] for module in modules]
        self._weight, self._bias = concatenate(modules)
        self._padding = len(self._weight) - sum(self._sizes)
        self._input: Tensor | None = None
        self._parts: list[Tensor | None] = []
        for number, module in enumerate(modules):
            module.__dict__["forward"] = partial(self._part, number)

    def undo(self) -> None:
        """Let each module compute its own part again; weights stay views of the whole."""
        for module in self._modules:
            del module.__dict__["forward"]

    def _part(self, number: int, x: Tensor) -> Tensor:
        if number == 0 or x is not self._input or self._parts[number] is None:
            product = _multiplied(self._weight, self._bias, x)
            sizes = [*self._sizes, self._padding] if self._padding else self._sizes
            self._input, self._parts = x, list(torch.split(product, sizes, -1))
        part = self._parts[number]
        assert part is not None
        self._parts[number] = None
        if all(other is None for other in self._parts[: len(self._sizes)]):
            self._input, self._parts = None, []
        return part


def _multiplied(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """A linear map of x [..., K], by the kernel for few rows where there are few, or none."""
    rows = x.reshape(-1, x.shape[-1])
    return products.product(rows, weight, bias).view(*x.shape[:-1], len(weight))


def _forward(module: nn.Linear, x: Tensor) -> Tensor:
    return _multiplied(module.weight, module.bias, x)


def _few_rows(model: Any, joint: list[JointProduct]) -> list[nn.Linear]:
    """Let linear maps that stand alone use that kernel, too; which these are."""
    members = {id(module) for product in joint for module in product._modules}
    alone = [
        module
        for module in model.modules()
        if type(module) is nn.Linear and id(module) not in members and not module.weight.is_meta
    ]
    for module in alone:
        module.__dict__["forward"] = partial(_forward, module)
    return alone


def fuse_linears(model: Any, forward: Forward) -> list[JointProduct]:
    """Put linear maps of the same input together, where the logits stay what they are.

    Args:
        model: transformers' model with dense weights, whole or a rank's part, and attention bound.
        forward: Its forward pass through transformers' own code.
    """
    before, groups = _watch(model, forward)
    joint = [JointProduct(modules) for modules in groups]
    alone = _few_rows(model, joint)
    if (cause := why_not(model, before, forward)) is not None:
        for product in joint:
            product.undo()
        for module in alone:
            del module.__dict__["forward"]
        _log.warning("linear maps of `%s` stay apart: %s", model.config.model_type, cause)
        return []
    return joint


def _watch(model: Any, forward: Forward) -> tuple[Tensor, list[list[nn.Linear]]]:
    """Logits of a probe, and the linear maps of a layer that were handed the same tensor."""
    calls: list[tuple[int, nn.Linear, Tensor]] = []
    hooks = []

    def note(layer: int, module: nn.Linear, inputs: tuple[Any, ...]) -> None:
        if len(inputs) == 1 and isinstance(inputs[0], Tensor):
            calls.append((layer, module, inputs[0]))

    for name, module in model.named_modules():
        if type(module) is nn.Linear and (layer := _layer(name)) is not None:
            hooks.append(module.register_forward_pre_hook(partial(note, layer)))
    try:
        (logits,) = probe_logits(model, forward)
    finally:
        for hook in hooks:
            hook.remove()
    times: dict[int, int] = {}
    for _, module, _ in calls:
        times[id(module)] = times.get(id(module), 0) + 1
    groups: dict[tuple[int, ...], list[nn.Linear]] = {}
    for layer, module, x in calls:  # holds every tensor, so that no id is used twice
        biased = int(module.bias is not None)
        if times[id(module)] == 1 and module.weight.dtype == x.dtype:
            groups.setdefault((layer, id(x), biased), []).append(module)
    return logits, [modules for modules in groups.values() if len(modules) > 1]


def _layer(name: str) -> int | None:
    """Layer of a module; None outside of the layers, such as the head."""
    try:
        return layer_of(name)
    except ModelError:
        return None


def fuse_norms(model: Any, *, backend: str = "auto") -> int:
    """Let RMS norms run as one kernel each, where they compute what the kernel does; how many.

    Args:
        model: transformers' model with dense weights.
        backend: One of `pw_kernels.step.BACKENDS`.
    """
    fused = 0
    for name, module in model.named_modules():
        if "RMSNorm" not in type(module).__name__:
            continue
        call = _norm_kernel(module, backend)
        if call is None or not _same_norm(module, call):
            _log.warning("norm `%s` keeps its own code", name)
            continue
        module.__dict__["forward"] = call
        fused += 1
    return fused


def epsilon_of(module: Any) -> float:
    """What a norm adds to the mean square.

    Raises:
        AttributeError: It says nothing of that.
    """
    return float(module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps)


def _norm_kernel(module: Any, backend: str) -> Callable[[Tensor], Tensor] | None:
    """The kernel with what a norm module says of itself."""
    weight: Tensor | None = getattr(module, "weight", None)
    try:
        epsilon = epsilon_of(module)
    except (AttributeError, TypeError):  # of torch's own norm it may be None
        return None
    if weight is not None and weight.dim() != 1:
        return None

    def call(x: Tensor) -> Tensor:
        return step.rms_norm(x, weight, epsilon, backend=backend)

    return call


@torch.inference_mode()
def _same_norm(module: Any, call: Callable[[Tensor], Tensor]) -> bool:
    """Whether a norm's own code and the kernel agree on random rows."""
    weight: Tensor | None = getattr(module, "weight", None)
    like = next(module.parameters(), weight)
    size, dtype = (64, torch.float32) if like is None else (like.shape[-1], like.dtype)
    device = torch.device("cpu") if like is None else like.device
    generator = torch.Generator().manual_seed(size)
    x = (3 * torch.randn(3, size, generator=generator)).to(device, dtype)
    try:
        found, expected = call(x), module(x)
    except (RuntimeError, TypeError, ValueError):
        return False
    tolerance = 1e-5 if dtype == torch.float32 else TOLERANCE[dtype]
    return found.dtype == expected.dtype and torch.allclose(
        found.float(), expected.float(), rtol=tolerance, atol=tolerance
    )
