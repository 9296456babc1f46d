"""A rank's place among the ranks of a replica, and what it makes of a loaded model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from pw.engine.experts import RoutedExperts, RoutingCounter
from pw.engine.parallel.own_experts import OwnExperts
from pw.engine.parallel.placing import place_experts
from pw.engine.parallel.share import Share, check_even
from pw.engine.parallel.source import SharedSource
from pw.engine.start.sources import Loaded, WeightSource
from pw.models.architecture import Architecture
from pw.models.slicing import DensePart, Reduction


@dataclass(frozen=True)
class Seat:
    """One of several ranks. Its `reduction` adds up partial results once the ranks have met."""

    rank: int
    size: int
    by_expert: bool
    reduction: Reduction = field(default_factory=Reduction)

    def dense_part(self, architecture: Architecture) -> DensePart:
        """What this rank keeps of the dense weights.

        Raises:
            ConfigError, ModelError: The model cannot be shared so.
        """
        check_even(architecture.geometry, self.size, by_expert=self.by_expert)
        return DensePart(architecture, self.rank, self.size, self.reduction)

    def shared(self, loaded: Loaded) -> Loaded:
        """What this rank keeps of the experts, dense weights being cut already."""
        share = Share(loaded.source.geometry, self.rank, self.size, self._placed(loaded.source))
        return Loaded(
            SharedSource(loaded.source, share),
            replace(loaded.skeleton, biases=share.biases(loaded.skeleton.biases)),
            None if loaded.dense is None else share.dense(loaded.dense),
        )

    def _placed(self, source: WeightSource) -> NDArray[np.int64] | None:
        """[L, e, R] experts by rank, the same on all ranks; None where each has a part of all."""
        if not self.by_expert:
            return None
        geometry = source.geometry
        mass = np.zeros((len(geometry.layers), geometry.experts))
        if not source.has_table("routing"):
            return place_experts(mass, self.size)
        arrays = source.table("routing").arrays
        mass = np.nansum(arrays["mass"], axis=0)
        return place_experts(mass, self.size, arrays.get("pairs"))  # older artifacts have none


def share_of(source: WeightSource) -> Share | None:
    """What a source is the share of; None where there is one rank."""
    return source.share if isinstance(source, SharedSource) else None


def by_rank(
    experts: RoutedExperts,
    source: WeightSource,
    counter: RoutingCounter | None,
    device: torch.device,
) -> RoutedExperts:
    """The experts function of a rank: ids of the model become its own where it has whole experts.

    Args:
        experts: Of this rank's blocks.
        source: Of this rank's blocks.
        counter: For routing that `experts` cannot count, because it sees its own tokens alone.
        device: Of the tensors.
    """
    share = share_of(source)
    if share is None or share.placed is None:
        return experts
    return OwnExperts(experts, share.local_ids(device), counter)
