"""The page table of a rank, as far as the ranks compare it."""

from __future__ import annotations

import hashlib

from pw.memory.page_table import WeightPageTable


class RankTable(WeightPageTable):
    """A page table that the other ranks have too."""

    def digest(self) -> str:
        """Bits and pages of all blocks: equal on all ranks that have made the same turns."""
        entries = self._mirror.host.numpy().tobytes()
        return hashlib.blake2b(entries, digest_size=8).hexdigest()
