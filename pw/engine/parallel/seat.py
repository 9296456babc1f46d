"""A rank's place among the ranks of a replica, and what it makes of a loaded model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from pw.engine.parallel.share import Share
from pw.engine.parallel.source import SharedSource
from pw.engine.start.sources import Loaded
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
        Share(architecture.geometry, self.rank, self.size, self.by_expert)  # refuses in time
        return DensePart(architecture, self.rank, self.size, self.reduction)

    def shared(self, loaded: Loaded) -> Loaded:
        """What this rank keeps of the experts, dense weights being cut already."""
        share = Share(loaded.source.geometry, self.rank, self.size, self.by_expert)
        return Loaded(
            SharedSource(loaded.source, share),
            replace(loaded.skeleton, biases=share.biases(loaded.skeleton.biases)),
            None if loaded.dense is None else share.dense(loaded.dense),
        )
