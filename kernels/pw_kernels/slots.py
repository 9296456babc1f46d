"""What routed experts are given before it is there, and what they give before it is added up.

Axes: T tokens, k experts of a token, N rows, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class SlotResults:
    """Results of the slots of a batch, a slot being one (token, expert) pair.

    Attributes:
        results: [T * k, N] fp32, times the router weights; a slot without an expert has anything.
        ids: [T, k] int64; outside [0, E): no expert.
        experts: E.
        live: [1] int32 tokens that are real, the others have no expert; None: all are.
    """

    results: Tensor
    ids: Tensor
    experts: int
    live: Tensor | None = None

    def sum(self, dtype: torch.dtype) -> Tensor:
        """[T, N] of `dtype`, rounded once."""
        present = (self.ids >= 0) & (self.ids < self.experts)
        if self.live is not None:
            tokens = torch.arange(len(present), device=present.device)
            present = present & (tokens < self.live)[:, None]
        parts = self.results.view(*self.ids.shape, -1)
        return torch.where(present[..., None], parts, 0.0).sum(1).to(dtype)


@dataclass(frozen=True, eq=False)
class Choice:
    """Experts of the tokens of a batch, before they are chosen: the launch that does may list them.

    Attributes:
        ids: [T, k] int64, to be written.
        weights: [T, k] fp32, to be written.
        experts: E that are chosen from.
        launch: Writes both and, given lists (`cuda_routing.Lists`) and the slots of a group, these;
            to be called once.
    """

    ids: Tensor
    weights: Tensor
    experts: int
    launch: Callable[[Any, int], None]

    @property
    def shape(self) -> torch.Size:
        """T, k."""
        return self.ids.shape

    def numel(self) -> int:
        """Slots."""
        return self.ids.numel()


def chosen(ids: Tensor | Choice, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Ids and weights that are there, of what may be a choice."""
    if isinstance(ids, Choice):
        ids.launch(None, 0)
        return ids.ids, ids.weights
    assert weights is not None
    return ids, weights
