"""Tool calls in each family's spelling, cut at random places: pieces add up to the whole."""

from __future__ import annotations

import json
import random

import pytest

from pw.serving.openai.tool_parsers import CallList, MarkedCalls, NamedCall
from pw.serving.openai.tool_syntaxes import SYNTAXES
from pw.serving.openai.tool_text import CallBegin, CallText

SCHEMAS = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "deep": {}},
    },
    "clock": {"type": "object", "properties": {}},
}
OSLO = ("weather", {"city": "Oslo", "days": 3})


def spelled(parser, pieces):
    """Content, and name and arguments of each call as they were written, after all pieces."""
    content, calls = "", []
    for found in [found for piece in pieces for found in parser.feed(piece)] + parser.finish():
        if isinstance(found, str):
            content += found
        elif isinstance(found, CallBegin):
            calls.append((found.name, ""))
        else:
            calls[-1] = (calls[-1][0], calls[-1][1] + found.text)
    return content, calls


def gathered(parser, pieces):
    """The same with the arguments read."""
    content, calls = spelled(parser, pieces)
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


def cuts(text, seed):
    """The text in random pieces."""
    chance = random.Random(seed)
    places = sorted(chance.sample(range(1, len(text)), min(len(text) - 1, chance.randint(0, 30))))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>'
CODER = """<tool_call>
<function=weather>
<parameter=city>
Oslo
</parameter>
<parameter=days>
3
</parameter>
</function>
</tool_call>"""
GEMMA = '<|tool_call>call:weather{city:<|"|>Oslo<|"|>,days:3}<tool_call|>'
FUNCTION_GEMMA = (
    "<start_function_call>call:weather{city:<escape>Oslo<escape>,days:3}<end_function_call>"
)

CASES = [
    ("hermes", HERMES, "", [OSLO]),
    ("hermes", f"I look.\n\n{HERMES}\n{HERMES}\n", "I look.", [OSLO, OSLO]),
    ("hermes", HERMES.removesuffix("\n</tool_call>"), "", [OSLO]),
    ("hermes", "no call <tool_cal> at all\n", "no call <tool_cal> at all\n", []),
    ("hermes", "a <tool_call>not json</tool_call> b", "a <tool_call>not json</tool_call> b", []),
    ("hermes", '<tool_call>{"name": "weather", "arg', '<tool_call>{"name": "weather", "arg', []),
    ("hermes", '<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
    (
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": "</tool_call>\\""}}</tool_call>',
        "",
        [("weather", {"city": '</tool_call>"'})],
    ),
    ("hermes", '<tool_call>{"name": "clock"}</tool_call>now', "now", [("clock", {})]),
    (
        "hermes",
        '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Zürich\\"}"}</tool_call>',
        "",
        [("weather", {"city": "Zürich"})],
    ),
    ("qwen3_coder", CODER, "", [OSLO]),
    ("qwen3_coder", f"So:\n{CODER}\n{CODER}", "So:", [OSLO, OSLO]),
    (
        "qwen3_coder",
        "<tool_call><function=weather><parameter=city>\n12\n</parameter><parameter=deep>\n"
        '{"a": [1]}\n</parameter><parameter=days>True</parameter></function></tool_call>',
        "",
        [("weather", {"city": "12", "deep": {"a": [1]}, "days": True})],
    ),
    ("qwen3_coder", "<tool_call><function=clock></function></tool_call>", "", [("clock", {})]),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}, '
        '{"name": "clock", "arguments": {}}]',
        "",
        [OSLO, ("clock", {})],
    ),
    (
        "mistral",
        'Wait. [TOOL_CALLS]weather[ARGS]{"city": "Oslo", "days": 3}[TOOL_CALLS]clock{}',
        "Wait.",
        [OSLO, ("clock", {})],
    ),
    ("mistral", "[TOOL_CALLS]weather[CALL_ID]a1[ARGS]{}", "", [("weather", {})]),
    ("mistral", "[TOOL_CALLS] nothing", "[TOOL_CALLS] nothing", []),
    ("gemma4", GEMMA, "", [OSLO]),
    ("gemma4", f"Sure.{GEMMA}{GEMMA}", "Sure.", [OSLO, OSLO]),
    (
        "gemma4",
        '<|tool_call>call:weather{city:<|"|>a "b", {c}: [d]<|"|>,days:-1.5e3,deep:{a:[1,true,'
        'null,<|"|>x<|"|>],b:{}}}<tool_call|>',
        "",
        [
            (
                "weather",
                {
                    "city": 'a "b", {c}: [d]',
                    "days": -1500.0,
                    "deep": {"a": [1, True, None, "x"], "b": {}},
                },
            )
        ],
    ),
    ("gemma4", "<|tool_call>call:clock{}<tool_call|>", "", [("clock", {})]),
    (
        "gemma4",
        '<|tool_call>call:weather{"city":"Oslo",<|"|>days<|"|>:3}<tool_call|>',
        "",
        [OSLO],
    ),
    ("gemma4", "<|tool_call>call:weather", "<|tool_call>call:weather", []),
    ("gemma4", "<|tool_call>caller", "<|tool_call>caller", []),
    (
        "gemma4",
        '<|tool_call>call:weather{city:<|"|>Oslo<|"|>,days:[],deep:{},}<tool_call|> ok',
        " ok",
        [("weather", {"city": "Oslo", "days": [], "deep": {}})],
    ),
    (
        "hermes",
        '<tool_call>{"arguments": {"city": "Oslo", "days": 3}, "name": "weather"}</tool_call>',
        "",
        [OSLO],
    ),
    (
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": "Oslo", "days": 3}, "id": "}"}}\n'
        "</tool_call>",
        "",
        [OSLO],
    ),
    ("hermes", "a<tool_call>b<tool_call>{}" + HERMES, "a<tool_call>b<tool_call>{}", [OSLO]),
    ("functiongemma", FUNCTION_GEMMA, "", [OSLO]),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_text_in_any_pieces(name, text, content, calls):
    whole = spelled(MarkedCalls(SYNTAXES[name], SCHEMAS), [text])
    assert gathered(MarkedCalls(SYNTAXES[name], SCHEMAS), [text]) == (content, calls)
    for place in range(1, len(text)):
        halves = [text[:place], text[place:]]
        assert spelled(MarkedCalls(SYNTAXES[name], SCHEMAS), halves) == whole
    for seed in range(20):
        assert spelled(MarkedCalls(SYNTAXES[name], SCHEMAS), cuts(text, seed)) == whole
    assert spelled(MarkedCalls(SYNTAXES[name], SCHEMAS), list(text)) == whole


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "mistral", "gemma4", "functiongemma"])
def test_calls_come_while_they_are_written(name):
    """First the name, then the arguments, none of whose characters waits for the call's end."""
    long = "x" * 500
    text, start = {
        "hermes": (f'<tool_call>{{"name": "weather", "arguments": {{"city": "{long}', 59),
        "qwen3_coder": (f"<tool_call>\n<function=weather>\n<parameter=city>\n{long}", 50),
        "mistral": (f'[TOOL_CALLS]weather{{"city": "{long}', 30),
        "gemma4": (f'<|tool_call>call:weather{{city:<|"|>{long}', 36),
        "functiongemma": (f"<start_function_call>call:weather{{city:<escape>{long}", 48),
    }[name]
    parser = MarkedCalls(SYNTAXES[name], SCHEMAS)
    pieces = [parser.feed(mark) for mark in text]
    assert next(piece for some in pieces[:start] for piece in some) == CallBegin("weather")
    assert pieces[-400:] == [[CallText("x")]] * 400


BROKEN = [
    (
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": "Os',
        [("weather", '{"city": "Os')],
    ),
    (
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"</tool_call>',
        [("weather", '{"city": "Oslo"')],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=weather><parameter=city>\nOs",
        [("weather", '{"city": "Os')],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=weather><parameter=city>Oslo</parameter><parameter=days>1",
        [("weather", '{"city": "Oslo"')],
    ),
    ("mistral", '[TOOL_CALLS]weather{"city": [1', [("weather", '{"city": [1')]),
    ("gemma4", '<|tool_call>call:weather{city:<|"|>Os', [("weather", '{"city": "Os')]),
    ("gemma4", "<|tool_call>call:weather{city:", [("weather", '{"city": ')]),
    ("gemma4", "<|tool_call>call:weather{days:12", [("weather", '{"days": ')]),
    (
        "gemma4",
        "<|tool_call>call:clock{a:" + "[" * 5000 + "<tool_call|>",
        [("clock", '{"a": ' + "[" * 5000)],
    ),
]


@pytest.mark.parametrize(("name", "text", "calls"), BROKEN)
def test_a_call_that_breaks_off_keeps_what_it_has(name, text, calls):
    assert spelled(MarkedCalls(SYNTAXES[name], SCHEMAS), [text]) == ("", calls)
    assert spelled(MarkedCalls(SYNTAXES[name], SCHEMAS), list(text)) == ("", calls)


@pytest.mark.parametrize("name", SYNTAXES)
def test_text_without_calls_passes_unchanged(name):
    chance = random.Random(3)
    marks = [SYNTAXES[name].begin[:5], SYNTAXES[name].begin[1:], " ", "\n", "x", "{", '"', "é🦊"]
    for seed in range(200):
        text = "".join(chance.choices(marks, k=12))
        if SYNTAXES[name].begin not in text:
            assert gathered(MarkedCalls(SYNTAXES[name], {}), cuts(text, seed)) == (text, [])


@pytest.mark.parametrize("name", SYNTAXES)
def test_noise_between_marks_never_raises(name):
    chance = random.Random(4)
    syntax = SYNTAXES[name]
    marks = [syntax.begin, *'{}[]:,"\\ \n', "call:", "name", "<|", "1", "call:f{", '<|"|>', "]}"]
    marks += ['{"name": "f", "arguments": ', "<function=f>", "<parameter=a>", "</parameter>"]
    marks += ["</tool_call>", "<tool_call|>", "<escape>", "<end_function_call>", "[ARGS]", "f{"]
    for seed in range(1500):
        text = syntax.begin + "".join(chance.choices(marks, k=15))
        whole = spelled(MarkedCalls(syntax, {}), [text])
        assert spelled(MarkedCalls(syntax, {}), cuts(text, seed)) == whole


def test_text_before_a_call_is_not_held_back():
    parser = MarkedCalls(SYNTAXES["hermes"], {})
    assert parser.feed("Let me see") == ["Let me see"]
    assert parser.feed(" <tool") == []
    assert parser.feed("box>") == [" <toolbox>"]


LISTED = '[{"name": "clock", "parameters": {"a": "]}\\""}}, {"name": "weather", "parameters": {"c'


def test_a_list_of_calls():
    calls = [("clock", '{"a": "]}\\""}'), ("weather", '{"c')]
    for place in range(len(LISTED)):
        assert spelled(CallList(), [LISTED[:place], LISTED[place:]]) == ("", calls)
    named = LISTED[: LISTED.rindex('"c')]
    assert spelled(CallList(), [named]) == ("", [calls[0], ("weather", "{")])
    assert spelled(CallList(), ['[{"name": "clo']) == ("", [])  # cut short before it is a call


def test_a_named_call_is_the_whole_text():
    parser = NamedCall("weather")
    assert parser.feed(" ") == []
    assert parser.feed('{"city"') == [CallBegin("weather"), CallText('{"city"')]
    assert parser.feed(": ") == [CallText(":")]
    assert parser.feed('"Oslo"}\n') == [CallText(' "Oslo"}')]
    assert parser.finish() == []
    assert spelled(NamedCall("clock"), []) == ("", [("clock", "")])
