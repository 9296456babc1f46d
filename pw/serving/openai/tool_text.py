"""Text that grows while it is read, and what a reader makes of it: content and calls in pieces.

A reader is a generator. It yields pieces as soon as they are certain and None where it needs more
text; so one that reads a family's spelling from left to right is also the parser of a stream. What
it decides depends on the text alone, never on how the text was cut.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar


@dataclass(frozen=True)
class CallBegin:
    """A call whose name is known; its arguments follow."""

    name: str


@dataclass(frozen=True)
class CallText:
    """More JSON text of the arguments of the call that began last."""

    text: str


Piece = str | CallBegin | CallText  # a text is content

T = TypeVar("T")
Reader = Generator[Piece | None, None, T]


class GrowingText:
    """What has come of a text and is not read yet.

    Attributes:
        ended: No more will come.
    """

    def __init__(self) -> None:
        self._held = ""
        self._at = 0  # characters of it that are read
        self._pinned = False  # whether what is read is kept
        self.ended = False

    def add(self, text: str) -> None:
        """Append what has come."""
        if not self._pinned:
            self._held, self._at = self._held[self._at :], 0
        self._held += text

    def pin(self) -> None:
        """Begin to keep what is read, for `back`."""
        self._held, self._at, self._pinned = self._held[self._at :], 0, True

    def commit(self) -> None:
        """What is read is not needed again."""
        self._pinned = False

    def back(self) -> None:
        """Go back to where `pin` was called."""
        self._at, self._pinned = 0, False

    @property
    def rest(self) -> str:
        """All that is not read yet."""
        return self._held[self._at :]

    def skip(self, count: int) -> None:
        """Read so many characters, which must have come."""
        self._at += count

    def peek(self, count: int = 1) -> Reader[str]:
        """The next characters, fewer at the end of the text."""
        while len(self._held) - self._at < count and not self.ended:
            yield None
        return self._held[self._at : self._at + count]

    def skip_any(self, marks: str = "") -> Reader[str]:
        """Read blank space and characters of `marks`; what stands behind, "" at the end."""
        while True:
            mark = yield from self.peek()
            if not mark or not (mark.isspace() or mark in marks):
                return mark
            self.skip(1)

    def take(self, mark: str) -> Reader[bool]:
        """Read a mark if it is what comes next."""
        for size in range(1, len(mark) + 1):
            if (yield from self.peek(size)) != mark[:size]:
                return False
        self.skip(len(mark))
        return True

    def until(self, *marks: str) -> Reader[tuple[str, str] | None]:
        """Read past the first of some marks; what is before it and which.

        Where none comes, all of the text is read, and it is None.
        """
        searched = 0
        while True:
            rest = self.rest
            places = {m: place for m in marks if (place := rest.find(m, searched)) >= 0}
            if places:
                mark = min(places, key=places.__getitem__)
                self.skip(places[mark] + len(mark))
                return rest[: places[mark]], mark
            searched = max(0, len(rest) - max(map(len, marks)) + 1)
            if self.ended:
                self.skip(len(rest))
                return None
            yield None


class JsonScanner:
    """Finds where a JSON object or array ends that comes in pieces.

    Args:
        depth: Objects and arrays that are open already.
    """

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._quoted = self._escaped = False
        self.broken = False  # what came cannot be JSON

    def feed(self, text: str) -> int | None:
        """Characters up to the end of the value, or to where it breaks off; None: it goes on."""
        for place, mark in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = mark == "\\", mark != '"'
            elif mark == '"':
                self._quoted = True
            elif mark == "<":  # of an end mark: it stands in no JSON outside of strings
                self.broken = True
                return place
            elif mark in "{[":
                self._depth += 1
            elif mark in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return place + 1
        return None


def read_json(text: GrowingText) -> Reader[bool]:
    """Pass on the object or array that comes next as text of a call; whether it is whole."""
    scanner = JsonScanner()
    while True:
        come = text.rest
        end = scanner.feed(come)
        text.skip(len(come) if end is None else end)
        if come[:end]:
            yield CallText(come[:end])
        if end is not None:
            return not scanner.broken
        if text.ended:
            return False
        yield None


def read_string(text: GrowingText, end: str, blank: str = "") -> Reader[bool]:
    """Pass on text up to a mark as a JSON string of a call; whether the mark came.

    Args:
        text: Read past the mark.
        end: The mark; it cannot be escaped.
        blank: Dropped where it stands right before the mark.
    """
    yield CallText('"')
    while True:
        come = text.rest
        place = come.find(end)
        if place >= 0:
            text.skip(place + len(end))
            yield CallText(_inside_quotes(come[:place].removesuffix(blank)) + '"')
            return True
        kept = 0 if text.ended else max(overlap(come, end), overlap(come, blank + end))
        sure = come[: len(come) - kept]
        text.skip(len(sure))
        if sure:
            yield CallText(_inside_quotes(sure))
        if text.ended:
            return False
        yield None


def json_of_bare(value: str) -> str:
    """JSON of a value that a model wrote as bare text: itself where it can be, else a string."""
    try:
        typed: Any = json.loads(value, parse_constant=_no_number)
    except (ValueError, RecursionError):
        typed = {"True": True, "False": False, "None": None}.get(value, value)
    return json.dumps(typed, ensure_ascii=False)


def overlap(text: str, mark: str) -> int:
    """Characters at the end of a text with which the mark may begin."""
    longest = min(len(text), len(mark) - 1)
    return next((size for size in range(longest, 0, -1) if mark.startswith(text[-size:])), 0)


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """The same pieces with neighbours of a kind put together."""
    whole: list[Piece] = []
    for piece in pieces:
        last = whole[-1] if whole else None
        if isinstance(piece, str) and isinstance(last, str):
            whole[-1] = last + piece
        elif isinstance(piece, CallText) and isinstance(last, CallText):
            whole[-1] = CallText(last.text + piece.text)
        else:
            whole.append(piece)
    return whole


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _inside_quotes(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
