"""Products of few rows with a weight matrix, and what comes before and after them in a layer.

A decode step multiplies one to some rows by every weight of a model: it waits for memory. On a GPU
one kernel reads the weights as fast as memory gives them and takes the norm before, the activation
and the sums after a product along (`cuda_products`); more rows, other devices and types go through
torch and the kernels of `step`. The choice is made per call by shapes alone.

Axes: T tokens, K columns of the weight, N rows of it, I inner.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from pw_kernels import step
from pw_kernels.product_plans import Plan
from pw_kernels.slots import SlotResults
from pw_kernels.step import Norm

BACKENDS = ("auto", "torch", "cuda")


class Gated(NamedTuple):
    """What `gated_product` gives."""

    out: Tensor  # [T, I]
    rest: Tensor  # [T, N - 2I]
    normed: Tensor  # [T, K], what was multiplied


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    add: Sequence[Tensor | SlotResults] = (),
    share: Tensor | None = None,
    beside: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Linear map of rows, and what is added to it: [T, N].

        norm(x) W^T + bias                              add is empty
        add[0] + norm(x) W^T + bias                     rounded once
        add[0] + add[1] + sigmoid(share) * product      the product rounded before

    Args:
        x: [T, K].
        weight: [N, K].
        bias: [N] or None.
        norm: Of the rows of x, or None.
        add: None, one or two of [T, N]; the second may be what experts give, before its sum.
        share: [T, 1] logits, only with two to add; None = the whole.
        beside: Other launches run meanwhile on the device.
        backend: One of BACKENDS.

    Raises:
        ValueError: The named backend cannot take these arguments, or is not installed.
    """
    launch = _launch(backend, x, weight, norm is not None, beside=beside)
    small = "torch" if backend == "torch" else "auto"
    if norm is not None and (launch is None or not launch.kernels.norms(x)):
        x, norm = step.rms_norm(x, norm.weight, norm.epsilon, backend=small), None
    if launch is not None:
        return launch.kernels.product(  # type: ignore[no-any-return]
            x, weight, bias, norm, add, share, launch.plan
        )
    if not add:
        return functional.linear(x, weight, bias)
    first, *more = (part.sum(x.dtype) if isinstance(part, SlotResults) else part for part in add)
    if not more:
        out = torch.addmm(first, x, weight.t())
        return out if bias is None else out + bias
    return step.join(first, more[0], functional.linear(x, weight, bias), share, backend=small)


def gated_product(
    x: Tensor,
    weight: Tensor,
    inner: int,
    activation: str,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    beside: bool = False,
    backend: str = "auto",
) -> Gated:
    """act(gate) * up of the product's first 2I columns, gate first, and the others as they are.

    Args:
        x: [T, K].
        weight: [N, K], of N >= 2I.
        inner: I; 0: nothing is gated.
        activation: "silu", "gelu" or "gelu_tanh".
        bias: [N] or None.
        norm: Of the rows of x, or None.
        beside: Other launches run meanwhile on the device.
        backend: One of BACKENDS.

    Raises:
        ValueError: The named backend cannot take these arguments, or is not installed.
    """
    launch = _launch(backend, x, weight, norm is not None, inner, beside=beside)
    small = "torch" if backend == "torch" else "auto"
    if norm is not None and (launch is None or not launch.kernels.norms(x)):
        x, norm = step.rms_norm(x, norm.weight, norm.epsilon, backend=small), None
    if launch is not None:
        return Gated(
            *launch.kernels.gated_product(x, weight, inner, activation, bias, norm, launch.plan)
        )
    both = functional.linear(x, weight, bias)
    if not inner:
        return Gated(both[:, :0], both, x)
    return Gated(step.gate(both, inner, activation, backend=small), both[:, 2 * inner :], x)


def takes_slots(x: Tensor, weight: Tensor) -> bool:
    """Whether a product of x [T, K] with a weight [N, K] adds up what experts give on its way."""
    return _launch("auto", x, weight, norm=False) is not None


def takes_norm(x: Tensor, weight: Tensor, inner: int = 0) -> bool:
    """Whether a product of x [T, K], of 2I gated rows, with [N, K] takes a norm along."""
    launch = _launch("auto", x, weight, norm=True, inner=inner)
    return launch is not None and bool(launch.kernels.norms(x))


class _Launch(NamedTuple):
    kernels: ModuleType
    plan: Plan


def _launch(
    backend: str, x: Tensor, weight: Tensor, norm: bool, inner: int = 0, *, beside: bool = False
) -> _Launch | None:
    """The kernels and how they are launched, where they are to be used."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "torch" or (backend == "auto" and x.device.type != "cuda"):
        return None
    module = _cuda()
    if module is not None:
        forced = backend == "cuda"
        plan = module.plan_of(x, weight, norm, inner, forced=forced, beside=beside)
        if plan is not None:
            return _Launch(module, plan)
    if backend == "cuda":
        raise ValueError(
            f"backend 'cuda' cannot multiply {list(x.shape)} by {list(weight.shape)} "
            f"on {x.device.type}"
        )
    return None


@cache
def _cuda() -> ModuleType | None:
    try:
        return import_module("pw_kernels.cuda_products")
    except ImportError:
        return None
