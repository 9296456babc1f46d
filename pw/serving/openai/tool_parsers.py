"""Tool calls in the text of a model: each family's own spelling, found while the text grows.

A parser turns pieces of text into content and complete calls, in order. What looks like a call and
is none stays content. It does not know HTTP; the spelling of answers is in `answers`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Schemas = Mapping[str, Mapping[str, Any]]  # function name -> JSON schema of its parameters


@dataclass(frozen=True)
class ToolCall:
    """One call."""

    name: str
    arguments: str  # JSON text, of an object unless the answer was cut short


Piece = str | ToolCall


class ToolParser(Protocol):
    """Splits one sequence's text into content and calls."""

    def feed(self, text: str) -> list[Piece]:
        """What is certain after some more text."""

    def finish(self) -> list[Piece]:
        """What was held back, at the end of the text."""


@dataclass(frozen=True)
class Syntax:
    """How a family of models writes calls: between two marks."""

    begin: str
    end: str  # "": up to the end of the text
    parse: Callable[[str, Schemas], list[ToolCall]]  # what is between; ValueError: no call


class MarkedCalls:
    """Finds calls between marks. Blank text beside a call is dropped, other text is content."""

    def __init__(self, syntax: Syntax, schemas: Schemas) -> None:
        self._syntax = syntax
        self._schemas = schemas
        self._held = ""
        self._inside = False
        self._blank = ""  # before the begin mark
        self._searched = 0  # characters of `_held` that hold no end mark
        self._called = False

    def feed(self, text: str) -> list[Piece]:
        """What is certain after some more text."""
        self._held += text
        pieces: list[Piece] = []
        while self._closed(pieces) if self._inside else self._opened(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        """What was held back; a last call without its end mark counts if it is whole."""
        rest, self._held = self._held, ""
        if self._inside:
            self._inside = False
            return self._calls(rest, rest)
        return [] if not rest or (self._called and rest.isspace()) else [rest]

    def _opened(self, pieces: list[Piece]) -> bool:
        """Give out content up to a begin mark or to what may become one."""
        begin = self._syntax.begin
        start = self._held.find(begin)
        found = start >= 0
        if not found:
            start = len(self._held) - _overlap(self._held, begin)
        content = self._held[:start].rstrip()
        if content:
            pieces.append(content)
        if found:
            self._blank = self._held[len(content) : start]
            self._held, self._inside, self._searched = self._held[start + len(begin) :], True, 0
        else:
            self._held = self._held[len(content) :]
        return found

    def _closed(self, pieces: list[Piece]) -> bool:
        """Give out the calls before an end mark, if it is there."""
        end = self._syntax.end
        at = self._held.find(end, self._searched) if end else -1
        if at < 0:
            self._searched = max(0, len(self._held) - len(end) + 1)
            return False
        body, rest = self._held[:at], self._held[at + len(end) :]
        if _in_json_string(body):
            self._searched = at + 1  # the mark is part of an argument
            return True
        self._held, self._inside = rest, False
        pieces.extend(self._calls(body, body + end))
        return True

    def _calls(self, body: str, spelled: str) -> list[Piece]:
        try:
            calls = self._syntax.parse(body, self._schemas)
        except (ValueError, RecursionError):
            calls = []
        self._called = self._called or bool(calls)
        return [*calls] or [self._blank + self._syntax.begin + spelled]


class NamedCall:
    """The whole text is the arguments of one function, as its grammar saw to."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._text = ""

    def feed(self, text: str) -> list[Piece]:
        """Nothing: the call is complete at the end."""
        self._text += text
        return []

    def finish(self) -> list[Piece]:
        """The call, cut short if the answer was."""
        return [ToolCall(self._name, self._text.strip())]


class CallList:
    """The text is a JSON array of `{"name": ..., "parameters": {...}}`, as its grammar saw to."""

    def __init__(self) -> None:
        self._text = ""
        self._depth = 0
        self._quoted = self._escaped = False

    def feed(self, text: str) -> list[Piece]:
        """The calls that are complete."""
        pieces: list[Piece] = []
        for mark in text:
            self._text += mark
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = mark == "\\", mark != '"'
            elif mark == '"':
                self._quoted = True
            elif mark in "[{":
                self._depth += 1
                if self._depth == 2:
                    self._text = mark
            elif mark in "]}":
                self._depth -= 1
                if self._depth == 1:
                    pieces.append(_named(json.loads(self._text), "parameters"))
        return pieces

    def finish(self) -> list[Piece]:
        """Nothing: a call that was cut short is none."""
        return []


def _overlap(text: str, mark: str) -> int:
    """Characters at the end of a text with which the mark may begin."""
    longest = min(len(text), len(mark) - 1)
    return next((size for size in range(longest, 0, -1) if mark.startswith(text[-size:])), 0)


def _in_json_string(body: str) -> bool:
    """Whether a JSON object that begins the body breaks off inside a string."""
    if not body.lstrip().startswith("{"):
        return False
    quotes = re.findall(r'\\.|"', body, re.DOTALL)
    return quotes.count('"') % 2 == 1


def _named(call: Any, arguments: str = "arguments") -> ToolCall:
    """A call from `{"name": ..., "arguments": {...}}`."""
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError("a call needs a name")
    given = call.get(arguments, call.get("parameters", {}))
    if isinstance(given, str):  # some models write the object as a string
        given = json.loads(given)
    if not isinstance(given, dict):
        raise ValueError("arguments are no object")
    return ToolCall(call["name"], json.dumps(given, ensure_ascii=False))


_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def _parse_qwen(body: str, schemas: Schemas) -> list[ToolCall]:
    """JSON as Hermes and Qwen write it, or the tags of Qwen3-Coder."""
    if body.lstrip().startswith("{"):
        return [_named(json.loads(body))]
    calls = []
    for name, inner in _FUNCTION.findall(body):
        schema = schemas.get(name.strip(), {})
        arguments = {key: _typed(value, key, schema) for key, value in _PARAMETER.findall(inner)}
        calls.append(ToolCall(name.strip(), json.dumps(arguments, ensure_ascii=False)))
    return calls


def _typed(value: str, key: str, schema: Mapping[str, Any]) -> Any:
    """A value that tags hold as text: text where the schema says so, JSON where it can be."""
    properties = schema.get("properties")
    stated = properties.get(key) if isinstance(properties, Mapping) else None
    if isinstance(stated, Mapping) and stated.get("type") == "string":
        return value
    try:
        return json.loads(value, parse_constant=_no_number)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(value, value)


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_MISTRAL_HEAD = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*[\w-]+\s*)?(?:\[ARGS\])?\s*")


def _parse_mistral(body: str, _schemas: Schemas) -> list[ToolCall]:
    """A JSON array of calls, or `name{...}` and `name[ARGS]{...}` after each mark."""
    if body.lstrip().startswith("["):
        listed, _ = json.JSONDecoder().raw_decode(body.lstrip())
        return [_named(call) for call in listed]
    calls = []
    for part in body.split("[TOOL_CALLS]"):
        head = _MISTRAL_HEAD.match(part)
        if head is None:
            raise ValueError("no function name")
        arguments, _ = json.JSONDecoder().raw_decode(part, head.end())
        calls.append(_named({"name": head[1], "arguments": arguments}))
    return calls


_GEMMA_HEAD = re.compile(r"\s*call:\s*([\w.-]+)\s*(?=\{)")


def _parse_gemma(quote: str) -> Callable[[str, Schemas], list[ToolCall]]:
    """`call:name{key:value}` with strings between two equal marks and nothing escaped."""

    def parse(body: str, _schemas: Schemas) -> list[ToolCall]:
        head = _GEMMA_HEAD.match(body)
        if head is None:
            raise ValueError("no call")
        arguments, _ = _GemmaValues(body, quote).value(head.end())
        return [ToolCall(head[1], json.dumps(arguments, ensure_ascii=False))]

    return parse


class _GemmaValues:
    """Reads objects with bare keys, arrays, marked strings, and JSON's other values."""

    _KEY = re.compile(r"\s*([^:,{}\[\]]+?)\s*:")
    _BARE = re.compile(r"[^,\]}]*")

    def __init__(self, text: str, quote: str) -> None:
        self._text = text
        self._quote = quote

    def value(self, at: int) -> tuple[Any, int]:
        """The value at a place, and where it ends."""
        at = self._skip(at)
        if self._text.startswith(self._quote, at):
            start = at + len(self._quote)
            end = self._text.index(self._quote, start)
            return self._text[start:end], end + len(self._quote)
        mark = self._text[at : at + 1]
        if mark == "{":
            return self._object(at + 1)
        if mark == "[":
            return self._array(at + 1)
        if mark == '"':
            return json.JSONDecoder().raw_decode(self._text, at)
        bare = self._BARE.match(self._text, at)
        assert bare is not None
        return _typed(bare[0].strip(), "", {}), bare.end()

    def _object(self, at: int) -> tuple[dict[str, Any], int]:
        values: dict[str, Any] = {}
        while (at := self._skip(at, ",")) < len(self._text):
            if self._text[at] == "}":
                return values, at + 1
            if self._text.startswith(self._quote, at) or self._text[at] == '"':
                key, at = self.value(at)
                at = self._text.index(":", at) + 1
            else:
                match = self._KEY.match(self._text, at)
                if match is None:
                    raise ValueError("no key")
                key, at = match[1], match.end()
            values[key], at = self.value(at)
        raise ValueError("object has no end")

    def _array(self, at: int) -> tuple[list[Any], int]:
        values: list[Any] = []
        while (at := self._skip(at, ",")) < len(self._text):
            if self._text[at] == "]":
                return values, at + 1
            value, at = self.value(at)
            values.append(value)
        raise ValueError("array has no end")

    def _skip(self, at: int, also: str = "") -> int:
        while at < len(self._text) and (self._text[at].isspace() or self._text[at] in also):
            at += 1
        return at


_QWEN = Syntax("<tool_call>", "</tool_call>", _parse_qwen)
SYNTAXES: dict[str, Syntax] = {
    "hermes": _QWEN,
    "qwen3_coder": _QWEN,
    "mistral": Syntax("[TOOL_CALLS]", "", _parse_mistral),
    "gemma4": Syntax("<|tool_call>", "<tool_call|>", _parse_gemma('<|"|>')),
    "functiongemma": Syntax(
        "<start_function_call>", "<end_function_call>", _parse_gemma("<escape>")
    ),
}
