"""Finds tool calls in a model's text while it grows, and gives them out as they come.

A parser turns pieces of text into content, beginnings of calls and text of their arguments, in
order. What looks like a call and is none stays content. It does not know HTTP; the spelling of
answers is in `answers`, that of calls in `tool_syntaxes`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from pw.serving.openai.tool_syntaxes import Schemas, Syntax, read_call_list
from pw.serving.openai.tool_text import (
    CallBegin,
    CallText,
    GrowingText,
    Piece,
    Reader,
    joined,
    overlap,
)


class ToolParser(ABC):
    """Splits one sequence's text into content and calls."""

    def __init__(self) -> None:
        self._text = GrowingText()
        self._reader = self._read(self._text)

    def feed(self, text: str) -> list[Piece]:
        """What is certain after some more text."""
        self._text.add(text)
        return self._certain()

    def finish(self) -> list[Piece]:
        """What was held back, at the end of the text."""
        self._text.ended = True
        return self._certain()

    def _certain(self) -> list[Piece]:
        pieces: list[Piece] = []
        for piece in self._reader:
            if piece is None:
                break
            pieces += [piece] if piece else []
        return joined(pieces)

    @abstractmethod
    def _read(self, text: GrowingText) -> Reader[None]:
        """Read the whole text."""


class MarkedCalls(ToolParser):
    """Calls behind marks. Blank text beside a call is dropped, other text is content."""

    def __init__(self, syntax: Syntax, schemas: Schemas) -> None:
        super().__init__()
        self._syntax, self._schemas = syntax, schemas

    def _read(self, text: GrowingText) -> Reader[None]:
        called, begin = False, self._syntax.begin
        while (blank := (yield from _read_content(text, begin))) is not None:
            text.pin()
            if (yield from self._syntax.read(text, self._schemas)):
                called = True
            else:
                text.back()
                yield blank + begin
        if not (called and text.rest.isspace()):
            yield text.rest


def _read_content(text: GrowingText, begin: str) -> Reader[str | None]:
    """Pass on content up to a begin mark and read that; the blank text before it.

    None at the end of the text, where at most blank text is left.
    """
    while True:
        come = text.rest
        start = come.find(begin)
        found = start >= 0
        if not found:
            start = len(come) - (0 if text.ended else overlap(come, begin))
        content = come[:start].rstrip()
        text.skip(len(content))
        if content:
            yield content
        if found:
            text.skip(start - len(content) + len(begin))
            return come[len(content) : start]
        if text.ended:
            return None
        yield None


class NamedCall(ToolParser):
    """The whole text is the arguments of one function, as its grammar saw to."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def _read(self, text: GrowingText) -> Reader[None]:
        yield from text.skip_any()
        yield CallBegin(self._name)
        while True:
            come = text.rest.rstrip()
            text.skip(len(come))
            if come:
                yield CallText(come)
            if text.ended:
                return
            yield None


class CallList(ToolParser):
    """The text is an array of `{"name": ..., "parameters": {...}}`, as its grammar saw to."""

    def _read(self, text: GrowingText) -> Reader[None]:
        """A call that is cut short before its arguments is none."""
        yield from read_call_list(text)
