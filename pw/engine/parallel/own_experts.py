"""The experts function of a rank that holds some of the experts whole."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pw.engine.context import Batch
from pw.engine.experts import RoutedExperts, RoutingCounter
from pw_kernels.dispatch import rehearsing
from pw_kernels.reference import count_routing, only_live


class OwnExperts:
    """Runs this rank's experts, for whichever tokens chose them; the sum over ranks is made later.

    Fixed shapes, no wait: the others' experts are ids that add nothing.

    Args:
        inner: Runs experts by their numbers on this rank.
        local: [L, E] int64: `Share.local_ids`.
        counter: Of all experts of the model, where somebody plans.
    """

    def __init__(self, inner: RoutedExperts, local: Tensor, counter: RoutingCounter | None) -> None:
        self._inner, self._local, self._counter = inner, local, counter

    @property
    def batch(self) -> Batch | None:
        """See `RoutedExperts`."""
        return self._inner.batch

    @batch.setter
    def batch(self, batch: Batch | None) -> None:
        self._inner.batch = batch

    def __call__(
        self, slot: int, _module: nn.Module, x: Tensor, ids: Tensor, weights: Tensor
    ) -> Tensor:
        """See `RoutedExperts`."""
        if self._counter is not None:
            live = None if self.batch is None else self.batch.live
            counted = ids if live is None else only_live(ids, live)
            count_routing(self._counter.sums[slot], counted, weights)
        if rehearsing(ids.device):
            ids = torch.zeros_like(ids)  # they may be any number, and are looked up
        own = torch.index_select(self._local[slot], 0, ids.flatten()).view(ids.shape)
        return self._inner(slot, _module, x, own, weights)

    def rehearse(self, tokens: int, dtype: torch.dtype) -> None:
        """See `RoutedExperts`."""
        self._inner.rehearse(tokens, dtype)
