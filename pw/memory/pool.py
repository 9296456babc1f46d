"""The one list of free pages, shared by weights and KV. Knows owners, not what a page holds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

FREE = -1


class OutOfPagesError(RuntimeError):
    """More pages were asked for than are free. Callers relieve pressure first; a bug otherwise."""


class PagePool:
    """Free list and owner of every page.

    An owner is a non-negative integer: block index for weights, `kv_owner(row)` for sequences.
    Pages leave and return in a fixed order (last freed, first taken), so that equal histories
    give equal page ids.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.owner = np.full(num_pages, FREE, dtype=np.int64)
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def free_count(self) -> int:
        """Pages nobody owns."""
        return len(self._free)

    @property
    def used_count(self) -> int:
        """Pages somebody owns."""
        return self.num_pages - len(self._free)

    def take(self, count: int, owner: int) -> list[int]:
        """Give `count` pages to `owner`.

        Raises:
            OutOfPagesError: Fewer are free; nothing was taken.
        """
        if count > len(self._free):
            raise OutOfPagesError(f"{count} pages asked for, {len(self._free)} free")
        if count == 0:
            return []
        pages = self._free[-count:]
        del self._free[-count:]
        self.owner[pages] = owner
        return pages

    def give_back(self, pages: Sequence[int], owner: int) -> None:
        """Take pages back from the owner that has them."""
        if len(pages) == 0:
            return
        if not (self.owner[pages] == owner).all():
            raise AssertionError(f"owner {owner} gives back pages of others: {list(pages)[:8]}")
        self.owner[pages] = FREE
        self._free.extend(reversed(pages))

    def check_integrity(self) -> None:
        """Every page is free once or owned once.

        Raises:
            AssertionError: The free list and the owners disagree.
        """
        free = np.asarray(self._free, dtype=np.int64)
        if len(np.unique(free)) != len(free):
            raise AssertionError("a page is in the free list twice")
        if not (self.owner[free] == FREE).all():
            raise AssertionError("an owned page is in the free list")
        if int((self.owner == FREE).sum()) != len(free):
            raise AssertionError("a page without owner is missing from the free list")
