"""Gemma's tool calls: `call:name{key:value}`, with strings between two equal marks, as they come.

Keys are bare; nothing in a string is escaped; other values are JSON's. Read without recursion: what
a model writes may be nested at any depth.
"""

from __future__ import annotations

import json
import re

from pw.serving.openai.tool_text import (
    CallBegin,
    CallText,
    GrowingText,
    Reader,
    json_of_bare,
    read_string,
)

_HEAD = re.compile(r"\s*call:\s*([\w.-]+)\s*(?=\{)")
_MAYBE_HEAD = re.compile(r"\s*+(?:c|ca|cal|call|call:\s*+[\w.-]*+\s*+)?")
_KEY = re.compile(r"[^:,{}\[\]]*")
_BARE = re.compile(r"[^,\]}]*")
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_CLOSING = {"{": "}", "[": "]"}


def read_gemma_call(text: GrowingText, quote: str, end: str) -> Reader[bool]:
    """One call and its end mark.

    Args:
        text: Behind the begin mark.
        quote: The mark around strings.
        end: The end mark.
    """
    while (head := _HEAD.match(text.rest)) is None:
        if text.ended or not _MAYBE_HEAD.fullmatch(text.rest):
            return False
        yield None
    text.skip(head.end())
    text.commit()
    yield CallBegin(head[1])
    if (yield from _read_object(text, quote)):
        yield from text.skip_any()
        yield from text.take(end)
    else:
        yield from text.until(end)
    return True


def _read_object(text: GrowingText, quote: str) -> Reader[bool]:
    """Pass on the object that comes next as JSON; whether it is whole."""
    opened: list[str] = []  # marks of what is open, outermost first
    first = True  # whether the next item is the first of its object or array
    while True:
        mark = yield from text.skip_any("," if opened else "")
        if opened and mark in ("}", "]"):
            text.skip(1)
            yield CallText(_CLOSING[opened.pop()])
            first = False
            if not opened:
                return True
            continue
        if not mark:
            return False
        if opened and not first:
            yield CallText(", ")
        if opened and opened[-1] == "{":
            if not (yield from _read_key(text, quote)):
                return False
            mark = yield from text.skip_any()
        first = mark in _CLOSING
        if first:
            text.skip(1)
            opened.append(mark)
            yield CallText(mark)
        elif not (yield from _read_value(text, quote)):
            return False


def _read_key(text: GrowingText, quote: str) -> Reader[bool]:
    """A key, bare or a string, and its colon; whether they are there."""
    if (yield from text.take(quote)):
        if not (yield from read_string(text, quote)):
            return False
    elif (yield from text.peek()) == '"':
        if not (yield from _read_json_string(text)):
            return False
    else:
        key = yield from _match(text, _KEY)
        if not key.strip():
            return False
        yield CallText(json.dumps(key.strip(), ensure_ascii=False))
    if (yield from text.skip_any()) != ":":
        return False
    text.skip(1)
    yield CallText(": ")
    return True


def _read_value(text: GrowingText, quote: str) -> Reader[bool]:
    """A string, number, true, false or null; whether it is whole."""
    if (yield from text.take(quote)):
        return (yield from read_string(text, quote))
    if (yield from text.peek()) == '"':
        return (yield from _read_json_string(text))
    bare = yield from _match(text, _BARE)
    if not (yield from text.peek()):
        return False  # cut short: nobody knows what it would have been
    yield CallText(json_of_bare(bare.strip()))
    return True


def _read_json_string(text: GrowingText) -> Reader[bool]:
    """A string as JSON has it; whether it is one."""
    while (found := _JSON_STRING.match(text.rest)) is None:
        if text.ended:
            return False
        yield None
    try:
        value = json.loads(found[0], strict=False)
    except ValueError:
        return False
    text.skip(found.end())
    yield CallText(json.dumps(value, ensure_ascii=False))
    return True


def _match(text: GrowingText, pattern: re.Pattern[str]) -> Reader[str]:
    """Read what a pattern of one class of characters matches, up to the first other one."""
    while True:
        rest = text.rest
        found = pattern.match(rest)
        assert found is not None  # it may match nothing
        if found.end() < len(rest) or text.ended:
            text.skip(found.end())
            return found[0]
        yield None
