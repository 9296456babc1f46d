"""From hidden states or logits of a decode step to the experts of each token.

On a GPU experts are chosen by the launch that lists the tokens of each (`cuda_routers`); with some
tokens and clusters of blocks it makes the logits, too. Elsewhere it is a product and a choice
(`products`, `step`). Which way is decided per call by shapes alone.

Axes: T tokens, H hidden, E experts, k experts of a token, F rows before the router's.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

from torch import Tensor

from pw_kernels import products, step
from pw_kernels.slots import Choice, chosen
from pw_kernels.step import Norm, Routing


def is_one_launch(x: Tensor, weight: Tensor, first: int, routing: Routing) -> bool:
    """Whether `choice` with the same arguments is one launch of this package's kernels."""
    kernels = _cuda() if x.device.type == "cuda" else None
    return kernels is not None and kernels.fits(x, weight, first, routing)


class Chosen(NamedTuple):
    """What `choice` gives."""

    ids: Tensor | Choice  # [T, k] int64, best first; or both as a choice still to be made
    weights: Tensor | None  # [T, k]; None of a choice
    others: Tensor  # [T, F], there when experts are chosen
    normed: Tensor  # [T, H], what was multiplied; as `others`


def choice(
    x: Tensor,
    weight: Tensor,
    first: int,
    routing: Routing,
    norm: Norm | None = None,
    *,
    beside: bool = False,
) -> Chosen:
    """Experts of each token, and what other rows of the same weight give.

    Args:
        x: [T, H].
        weight: [F + E or more, H]: rows of others, rows of the router, any others.
        first: F.
        routing: What the router does with logits that are a plain product.
        norm: Of the rows of x, or None.
        beside: Other launches run meanwhile, which are in less of a hurry.
    """
    kernels = _cuda()
    if kernels is not None and is_one_launch(x, weight, first, routing):
        made, others, normed = kernels.choice(x, weight, first, routing, norm, beside)
        return Chosen(made, None, others, normed)
    _, both, normed = products.gated_product(x, weight, 0, "silu", norm=norm)
    logits = both[:, first : first + len(routing.weight)]
    return Chosen(*choose(logits, routing), both[:, :first], normed)


def choose(logits: Tensor, routing: Routing) -> tuple[Tensor | Choice, Tensor | None]:
    """As `choice`, from the logits [T, E]."""
    kernels = _cuda() if logits.device.type == "cuda" else None
    if kernels is not None and kernels.takes(logits, routing):
        made = kernels.choose(logits, routing)
        return (made, None) if len(logits) <= kernels.MOST_LISTED else chosen(made, None)
    return step.choose(logits, routing)


@cache
def _cuda() -> ModuleType | None:
    try:
        return import_module("pw_kernels.cuda_routers")
    except ImportError:
        return None
