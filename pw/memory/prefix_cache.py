"""Units of KV that can be used again: found by the tokens up to their end, kept until others need
their pages.

A unit (see `pw.memory.kv_layout`) that a sequence has filled is entered under a keyed hash of all
tokens up to its end, so equal hashes mean equal contexts; the key is fresh for each process, so
nobody outside can make two contexts meet. Only whole units are shared and nobody writes to a whole
unit, so nothing is ever copied. While a sequence uses a unit its pages are owned; after that they
are idle: free pages like all others, handed out last, least recently used first.

Every entry says at which widths it was computed, its own and those of the units before it, the
worst of them counting. What an entry may be used for after the widths have changed:

    not-worse   at most 1/8 mean bit below the widths of now: never noticeably worse than computing
                it again. The default: a prompt that everybody shares would otherwise keep, as long
                as it stays popular, what one moment of pressure made of it
    any         always, as the KV of a running sequence is kept when widths change
    exact       at the widths of now alone: equal requests then stay equal
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NewType

import numpy as np

from pw.memory.kv_layout import GroupShape, first_unit
from pw.memory.pool import PagePool

Digest = NewType("Digest", bytes)

RULES = ("not-worse", "any", "exact")
# A bit less makes the loss 4 to 6 times as large (README, 2 to 5 bits): 1/8 bit adds a fifth of it.
SLACK_BITS = 0.125
_DIGEST_BYTES = 16


@dataclass(frozen=True)
class PrecisionTag:
    """Widths of the experts at which KV was computed.

    Attributes:
        mean_bits: Mean over the routed weights, the least of all steps that took part.
        least_bits: Narrowest block in any of them.
        epoch: Names the widths of all blocks; None once they changed on the way.
    """

    mean_bits: float
    least_bits: int
    epoch: bytes | None

    def merged(self, other: PrecisionTag) -> PrecisionTag:
        """Of what was computed at both."""
        return PrecisionTag(
            min(self.mean_bits, other.mean_bits),
            min(self.least_bits, other.least_bits),
            self.epoch if self.epoch == other.epoch else None,
        )

    def serves(self, now: PrecisionTag, rule: str) -> bool:
        """Whether KV of this tag may stand in for KV computed at the widths of `now`."""
        if rule == "exact":
            return self.epoch is not None and self.epoch == now.epoch
        return rule == "any" or self.mean_bits >= now.mean_bits - SLACK_BITS


class PrefixChain:
    """Digests of a growing sequence of tokens: number i stands for all tokens of units 0..i."""

    def __init__(self, key: bytes, unit: int) -> None:
        self._hash = hashlib.blake2b(key=key, digest_size=_DIGEST_BYTES)
        self._unit = unit
        self.digests: list[Digest] = []

    def extend(self, tokens: Callable[[int, int], Sequence[int]], length: int) -> None:
        """Take in the whole units among the first `length` tokens; `tokens(start, end)` reads."""
        for index in range(len(self.digests), length // self._unit):
            ids = tokens(index * self._unit, (index + 1) * self._unit)
            self._hash.update(np.array(ids, dtype=np.int64).tobytes())
            self.digests.append(Digest(self._hash.copy().digest()))


@dataclass(eq=False)
class Part:
    """Pages of a unit in one group of layers: [layers * blocks of a unit], layer by layer."""

    entry: PrefixEntry
    group: int
    pages: list[int]
    users: int = 0


@dataclass(eq=False)
class PrefixEntry:
    """One unit. A part is None where a window has left it behind or it was evicted."""

    digest: Digest
    tag: PrecisionTag
    note: object  # what the engine wants to find again with the prefix
    parts: list[Part | None] = field(default_factory=list)  # by group
    listed: bool = True  # can be found; otherwise its pages are freed with its last user


@dataclass(frozen=True)
class PrefixMatch:
    """The longest reusable start of a sequence."""

    entries: tuple[PrefixEntry, ...] = ()
    tokens: int = 0
    first: tuple[int, ...] = ()  # first unit needed, by group
    held: int = 0  # pages of it that other sequences use now: they cost no free page


class PrefixCache:
    """Entries and the order in which their pages are given up.

    Args:
        pool: Idle pages are counted there, and it asks for them.
        groups: Groups of layers, as the KV cache has them.
        unit: Tokens of a unit.
        owner: Owner number of pages that somebody uses.
        rule: One of `RULES`.

    Attributes:
        used_pages: Pages that sequences use.
        queries: Tokens looked up at admissions.
        hits: Tokens found.
    """

    def __init__(
        self, pool: PagePool, groups: Sequence[GroupShape], unit: int, owner: int, rule: str
    ) -> None:
        self._pool, self._unit, self._rule = pool, unit, rule
        self._windows = [group.window for group in groups]
        self.owner = owner
        self._key = os.urandom(32)
        self._entries: dict[Digest, PrefixEntry] = {}
        self._idle: dict[Part, None] = {}  # least recently used first
        self.used_pages = self.queries = self.hits = 0
        pool.reclaim = self._reclaim

    def chain(self) -> PrefixChain:
        """Digests for a new sequence."""
        return PrefixChain(self._key, self._unit)

    # -- finding -----------------------------------------------------------------------------

    def match(
        self, digests: Sequence[Digest], now: PrecisionTag, least_bits: int | None = None
    ) -> PrefixMatch:
        """The longest start of a sequence that can be used.

        Args:
            digests: Of its whole units, as many as may be reused.
            now: Widths of the experts now.
            least_bits: No block may have been narrower.
        """
        found: list[PrefixEntry] = []
        for digest in digests:
            entry = self._entries.get(digest)
            if entry is None or not entry.tag.serves(now, self._rule):
                break
            if least_bits is not None and entry.tag.least_bits < least_bits:
                break
            found.append(entry)
        while found:
            first = tuple(self._first(window, len(found)) for window in self._windows)
            missing = self._missing(found, first)
            if missing is None:
                entries = tuple(found)
                return PrefixMatch(
                    entries, len(found) * self._unit, first, self._held(entries, first)
                )
            del found[missing:]
        return PrefixMatch()

    def _first(self, window: int | None, units: int) -> int:
        return 0 if window is None else first_unit(window, units * self._unit, self._unit)

    @staticmethod
    def _missing(found: Sequence[PrefixEntry], first: Sequence[int]) -> int | None:
        """A unit that is needed and whose pages are gone, the last one if there are several."""
        gone = [
            unit
            for group, start in enumerate(first)
            for unit in range(start, len(found))
            if found[unit].parts[group] is None
        ]
        return max(gone, default=None)

    @staticmethod
    def _held(entries: Sequence[PrefixEntry], first: Sequence[int]) -> int:
        parts = (
            entries[unit].parts[group]
            for group, start in enumerate(first)
            for unit in range(start, len(entries))
        )
        return sum(len(part.pages) for part in parts if part is not None and part.users)

    # -- entering ----------------------------------------------------------------------------

    def wants(self, digest: Digest, tag: PrecisionTag, parts: Sequence[list[int] | None]) -> bool:
        """Whether a unit is new here, or better or more complete than what is here."""
        old = self._entries.get(digest)
        if old is None:
            return True
        if self._rule == "exact" and tag.epoch is not None and old.tag.epoch != tag.epoch:
            return True
        if old.tag.mean_bits != tag.mean_bits:
            return tag.mean_bits > old.tag.mean_bits
        return any(
            have is None and new is not None for have, new in zip(old.parts, parts, strict=True)
        )

    def enter(
        self,
        digest: Digest,
        tag: PrecisionTag,
        note: object,
        parts: Sequence[list[int] | None],
        owner: int,
    ) -> PrefixEntry:
        """List a unit, in the place of one of the same tokens; `owner` is its first user."""
        if old := self._entries.get(digest):
            self.forget(old)
        entry = PrefixEntry(digest, tag, note)
        for group, pages in enumerate(parts):
            part = None if pages is None else Part(entry, group, pages, users=1)
            entry.parts.append(part)
            if part is not None:
                self._pool.hand_over(part.pages, owner, self.owner)
                self.used_pages += len(part.pages)
        self._entries[digest] = entry
        return entry

    def forget(self, entry: PrefixEntry) -> None:
        """No longer find a unit. Its users keep it to their end."""
        if not entry.listed:
            return
        entry.listed = False
        del self._entries[entry.digest]
        for part in entry.parts:
            if part is not None and part in self._idle:
                self._discard(part)

    def clear(self) -> None:
        """No longer find anything."""
        for entry in list(self._entries.values()):
            self.forget(entry)

    # -- using -------------------------------------------------------------------------------

    def use(self, part: Part) -> None:
        """One user more."""
        if part.users == 0:
            del self._idle[part]
            self._pool.take_up(part.pages, self.owner)
            self.used_pages += len(part.pages)
        part.users += 1

    def leave(self, part: Part) -> None:
        """One user less; the last one leaves the pages idle, or blank if nobody can find them."""
        part.users -= 1
        if part.users:
            return
        self.used_pages -= len(part.pages)
        if part.entry.listed:
            self._pool.set_aside(part.pages, self.owner)
            self._idle[part] = None
        else:
            self._pool.give_back(part.pages, self.owner)

    def _reclaim(self, count: int) -> None:
        """Blank so many idle pages or a few more, least recently used first."""
        target = self._pool.idle_count - count
        while self._pool.idle_count > target:
            part = next(iter(self._idle))
            entry = part.entry
            if self._windows[part.group] is None:
                self.forget(entry)  # of no use without this part
            else:
                self._discard(part)
                if not any(entry.parts):
                    self.forget(entry)

    def _discard(self, part: Part) -> None:
        del self._idle[part]
        self._pool.discard(part.pages)
        part.entry.parts[part.group] = None

    # -- checking ----------------------------------------------------------------------------

    def check_integrity(self, used: Iterable[Part]) -> None:
        """Users and pages of every part.

        Args:
            used: Parts that sequences use, once for each use.

        Raises:
            AssertionError: The books disagree with them or with the pool.
        """
        users: dict[Part, int] = dict.fromkeys(self._idle, 0)
        for part in used:
            users[part] = users.get(part, 0) + 1
        listed = {part for entry in self._entries.values() for part in entry.parts if part}
        if not listed <= users.keys():
            raise AssertionError("a part is listed that is neither idle nor used")
        if any(part.users != count for part, count in users.items()):
            raise AssertionError("users of a part are miscounted")
        owned = sum(len(part.pages) for part in users if part.users)
        found = int((self._pool.owner == self.owner).sum())
        if not owned == found == self.used_pages:
            raise AssertionError(f"{found} shared pages in the pool, {self.used_pages} counted")
        if sum(len(part.pages) for part in self._idle) != self._pool.idle_count:
            raise AssertionError("idle pages of the pool and of the prefix cache disagree")
        pages = [page for part in users for page in part.pages]
        if len(set(pages)) != len(pages):
            raise AssertionError("a page is in two parts")
