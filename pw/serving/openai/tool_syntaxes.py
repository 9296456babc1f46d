"""How families of models write tool calls, each as a reader of growing text.

A reader begins behind the family's begin mark. It returns False where no call stands there; once a
call's name and the opening of its arguments have come, it is a call. An end mark that is missing
does no harm; an answer that is cut short leaves arguments that are cut short.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pw.serving.openai.gemma_calls import read_gemma_call
from pw.serving.openai.tool_text import (
    CallBegin,
    CallText,
    GrowingText,
    JsonScanner,
    Reader,
    json_of_bare,
    read_json,
    read_string,
)

Schemas = Mapping[str, Mapping[str, Any]]  # function name -> JSON schema of its parameters


@dataclass(frozen=True)
class Syntax:
    """How a family of models writes calls."""

    begin: str  # the mark before a call
    read: Callable[[GrowingText, Schemas], Reader[bool]]


# -- JSON objects: Hermes, Qwen, Mistral, and answers that a grammar binds -------------------------

_JSON_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*"((?:[^"\\]|\\.)*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


def read_json_call(text: GrowingText) -> Reader[bool]:
    """`{"name": ..., "arguments": {...}}` as it comes; in another order or form at its end."""
    scanner, scanned = JsonScanner(), 0
    while (head := _JSON_HEAD.match(text.rest)) is None:
        come = text.rest
        end = scanner.feed(come[scanned:])
        if end is not None:
            return (yield from _whole_json_call(text, scanned + end))
        scanned = len(come)
        if text.ended:
            return False
        yield None
    try:
        name = json.loads(f'"{head[1]}"')
    except ValueError:
        return False
    text.skip(head.end())
    text.commit()
    yield CallBegin(name)
    if (yield from read_json(text)):
        yield from _rest_of_object(text)
    return True


def _whole_json_call(text: GrowingText, size: int) -> Reader[bool]:
    """A call that does not begin with its name, or whose arguments are a string or missing."""
    try:
        call = json.loads(text.rest[:size])
        given = call.get("arguments", call.get("parameters", {}))
        if isinstance(given, str):  # some models write the object as a string
            given = json.loads(given)
    except (ValueError, RecursionError, AttributeError):
        return False
    if not isinstance(call.get("name"), str) or not isinstance(given, dict):
        return False
    text.skip(size)
    text.commit()
    yield CallBegin(call["name"])
    yield CallText(json.dumps(given, ensure_ascii=False))
    return True


def _rest_of_object(text: GrowingText) -> Reader[None]:
    """What an object holds beside name and arguments, and its end."""
    scanner = JsonScanner(depth=1)
    while True:
        come = text.rest
        end = scanner.feed(come)
        text.skip(len(come) if end is None else end)
        if end is not None or text.ended:
            return
        yield None


def read_call_list(text: GrowingText) -> Reader[bool]:
    """A JSON array of calls; False where the first is none."""
    yield from text.skip_any()
    if not (yield from text.take("[")):
        return False
    calls = 0
    while (yield from text.skip_any(",")) == "{":
        if not (yield from read_json_call(text)):
            break
        calls += 1
    yield from text.take("]")
    return calls > 0


# -- Hermes and Qwen -------------------------------------------------------------------------------

_QWEN_END, _FUNCTION_END, _PARAMETER_END = "</tool_call>", "</function>", "</parameter>"
_FUNCTION, _PARAMETER = "<function=", "<parameter="


def _read_qwen(text: GrowingText, schemas: Schemas) -> Reader[bool]:
    """JSON as Hermes and Qwen write it, or the tags of Qwen3-Coder."""
    if (yield from text.skip_any()) == "{":
        found = yield from read_json_call(text)
        if found:
            yield from text.skip_any("}")  # some models close once too often
    else:
        found = yield from _read_tags(text, schemas)
    if found:
        yield from text.skip_any()
        yield from text.take(_QWEN_END)
    return found


def _read_tags(text: GrowingText, schemas: Schemas) -> Reader[bool]:
    """`<function=name><parameter=key>value</parameter></function>`, once or more often."""
    calls = 0
    while (yield from text.take(_FUNCTION)):
        found = yield from text.until(">", "\n")
        name = found[0].strip() if found else ""
        if not found or found[1] == "\n" or not name:
            break
        calls += 1
        text.commit()
        yield CallBegin(name)
        yield from _read_parameters(text, schemas.get(name, {}))
        yield from text.skip_any()
    return calls > 0


def _read_parameters(text: GrowingText, schema: Mapping[str, Any]) -> Reader[None]:
    """The arguments of a function up to its end tag."""
    opening = "{"
    while (found := (yield from text.until(_PARAMETER, _FUNCTION_END, _QWEN_END))) is not None:
        if found[1] != _PARAMETER:
            yield CallText("{}" if opening == "{" else "}")
            return
        named = yield from text.until(">")
        if named is None:
            return
        yield from text.take("\n")
        start = f"{opening}{json.dumps(named[0], ensure_ascii=False)}: "
        opening = ", "
        if _is_string(schema, named[0]):
            yield CallText(start)
            yield from read_string(text, _PARAMETER_END, "\n")
        elif value := (yield from text.until(_PARAMETER_END)):
            yield CallText(start + json_of_bare(value[0].removesuffix("\n")))


def _is_string(schema: Mapping[str, Any], key: str) -> bool:
    properties = schema.get("properties")
    stated = properties.get(key) if isinstance(properties, Mapping) else None
    return isinstance(stated, Mapping) and stated.get("type") == "string"


# -- Mistral ---------------------------------------------------------------------------------------

_MISTRAL_HEAD = re.compile(r"([\w.-]+)\s*+(?:\[CALL_ID\]\s*+[\w-]++\s*+)?(?:\[ARGS\])?\s*+(?=\{)")
_MISTRAL_MAYBE = re.compile(r"[\w.-]*+\s*+(?:\[[A-Z_]*+\]?+\s*+[\w-]*+\s*+){0,2}")


def _read_mistral(text: GrowingText, _schemas: Schemas) -> Reader[bool]:
    """A JSON array of calls, or `name{...}` and `name[ARGS]{...}` after each mark."""
    if (yield from text.skip_any()) == "[":
        return (yield from read_call_list(text))
    while (head := _MISTRAL_HEAD.match(text.rest)) is None:
        if text.ended or not _MISTRAL_MAYBE.fullmatch(text.rest):
            return False
        yield None
    text.skip(head.end())
    text.commit()
    yield CallBegin(head[1])
    yield from read_json(text)
    return True


def _gemma(quote: str, end: str) -> Callable[[GrowingText, Schemas], Reader[bool]]:
    return lambda text, _schemas: read_gemma_call(text, quote, end)


_QWEN = Syntax("<tool_call>", _read_qwen)
SYNTAXES: dict[str, Syntax] = {
    "hermes": _QWEN,
    "qwen3_coder": _QWEN,
    "mistral": Syntax("[TOOL_CALLS]", _read_mistral),
    "gemma4": Syntax("<|tool_call>", _gemma('<|"|>', "<tool_call|>")),
    "functiongemma": Syntax("<start_function_call>", _gemma("<escape>", "<end_function_call>")),
}
