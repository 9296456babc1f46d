"""What routed experts give before it is added up for each token.

Axes: T tokens, k experts of a token, N rows, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

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
