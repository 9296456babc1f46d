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

from torch import Tensor

from pw_kernels import products, step
from pw_kernels.slots import Choice, chosen
from pw_kernels.step import Routing


def choice(
    x: Tensor, weight: Tensor, first: int, routing: Routing
) -> tuple[Tensor | Choice, Tensor | None, Tensor]:
    """Experts of each token, and what other rows of the same weight give.

    Args:
        x: [T, H].
        weight: [F + E or more, H]: rows of others, rows of the router, any others.
        first: F.
        routing: What the router does with logits that are a plain product.

    Returns:
        Ids [T, k] int64, best first, weights [T, k], or both as a choice that is still to be made,
        with None; and the product with the first F rows [T, F], there when experts are chosen.
    """
    kernels = _cuda() if x.device.type == "cuda" else None
    if kernels is not None and kernels.fits(x, weight, first, routing):
        made, others = kernels.choice(x, weight, first, routing)
        return made, None, others
    both = products.product(x, weight)
    logits = both[:, first : first + len(routing.weight)]
    return (*choose(logits, routing), both[:, :first])


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
