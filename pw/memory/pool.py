"""The one list of free pages, shared by weights and KV. Knows owners, not what a page holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

FREE = -1
IDLE = -2  # free to be taken, but what it holds may still be wanted: taken last


class OutOfPagesError(RuntimeError):
    """More pages were asked for than are free. Callers relieve pressure first; a bug otherwise."""


class PagePool:
    """Free list and owner of every page.

    An owner is a non-negative integer: block index for weights, numbers above for sequences and
    for the prefix cache. Pages leave and return in a fixed order (last freed, first taken), so that
    equal histories give equal page ids.

    An idle page is a free page with a memory: its last owner set it aside, takes it up again if it
    is lucky, and loses it as soon as blank pages do not suffice for somebody else. So it never
    holds anything up: whoever counts free pages counts it.

    Attributes:
        reclaim: Called with the number of idle pages that must be discarded now.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.owner = np.full(num_pages, FREE, dtype=np.int64)
        self.reclaim: Callable[[int], None] | None = None
        self._free = list(range(num_pages - 1, -1, -1))
        self._idle = 0

    @property
    def free_count(self) -> int:
        """Pages that can be taken, idle ones included."""
        return len(self._free) + self._idle

    @property
    def idle_count(self) -> int:
        """Free pages whose content may still be wanted."""
        return self._idle

    @property
    def used_count(self) -> int:
        """Pages somebody owns."""
        return self.num_pages - self.free_count

    def take(self, count: int, owner: int) -> list[int]:
        """Give `count` pages to `owner`, blank ones first.

        Raises:
            OutOfPagesError: Fewer are free; nothing was taken.
        """
        if count > self.free_count:
            raise OutOfPagesError(f"{count} pages asked for, {self.free_count} free")
        if count == 0:
            return []
        if count > len(self._free):
            assert self.reclaim is not None
            self.reclaim(count - len(self._free))
        pages = self._free[-count:]
        del self._free[-count:]
        self.owner[pages] = owner
        return pages

    def give_back(self, pages: Sequence[int], owner: int) -> None:
        """Take pages back from the owner that has them."""
        if len(pages) == 0:
            return
        self._change(pages, owner, FREE)
        self._free.extend(reversed(pages))

    def hand_over(self, pages: Sequence[int], owner: int, heir: int) -> None:
        """Change the owner of pages."""
        self._change(pages, owner, heir)

    def set_aside(self, pages: Sequence[int], owner: int) -> None:
        """Let pages go that their owner may want again: they are idle."""
        self._change(pages, owner, IDLE)
        self._idle += len(pages)

    def take_up(self, pages: Sequence[int], owner: int) -> None:
        """Give idle pages, with what they hold, to an owner."""
        self._change(pages, IDLE, owner)
        self._idle -= len(pages)

    def discard(self, pages: Sequence[int]) -> None:
        """Forget what idle pages hold: they are blank."""
        self._change(pages, IDLE, FREE)
        self._idle -= len(pages)
        self._free.extend(reversed(pages))

    def _change(self, pages: Sequence[int], old: int, new: int) -> None:
        if not (self.owner[pages] == old).all():
            raise AssertionError(f"owner {old} gives back pages of others: {list(pages)[:8]}")
        self.owner[pages] = new

    def check_integrity(self) -> None:
        """Every page is free once, idle, or owned once.

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
        if int((self.owner == IDLE).sum()) != self._idle:
            raise AssertionError(f"{self._idle} idle pages counted, not as many found")
