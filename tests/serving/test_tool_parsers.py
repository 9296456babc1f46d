"""Tool calls in each family's spelling, cut at random places: pieces add up to the whole."""

from __future__ import annotations

import json
import random

import pytest

from pw.serving.openai.tool_parsers import SYNTAXES, CallList, MarkedCalls, NamedCall, ToolCall

SCHEMAS = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "deep": {}},
    },
    "clock": {"type": "object", "properties": {}},
}
OSLO = ("weather", {"city": "Oslo", "days": 3})


def gathered(parser, pieces):
    """Content and calls after all pieces."""
    found = [found for piece in pieces for found in parser.feed(piece)] + parser.finish()
    content = "".join(each for each in found if isinstance(each, str))
    return content, [
        (each.name, json.loads(each.arguments)) for each in found if isinstance(each, ToolCall)
    ]


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
    ("gemma4", "<|tool_call>call:weather{city:", "<|tool_call>call:weather{city:", []),
    ("functiongemma", FUNCTION_GEMMA, "", [OSLO]),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_text_in_any_pieces(name, text, content, calls):
    for seed in range(40):
        assert gathered(MarkedCalls(SYNTAXES[name], SCHEMAS), cuts(text, seed)) == (content, calls)
    assert gathered(MarkedCalls(SYNTAXES[name], SCHEMAS), list(text)) == (content, calls)


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
    marks = [syntax.begin, syntax.end, *'{}[]:,"\\ ', "call:", "name", "<|", "<parameter=a>", "1"]
    for seed in range(500):
        text = syntax.begin + "".join(chance.choices(marks, k=15))
        whole = gathered(MarkedCalls(syntax, {}), [text])
        assert gathered(MarkedCalls(syntax, {}), cuts(text, seed)) == whole


def test_deep_arguments_are_content_and_no_crash():
    text = "<|tool_call>call:clock{a:" + "[" * 5000 + "<tool_call|>"
    assert gathered(MarkedCalls(SYNTAXES["gemma4"], {}), [text]) == (text, [])


def test_text_before_a_call_is_not_held_back():
    parser = MarkedCalls(SYNTAXES["hermes"], {})
    assert parser.feed("Let me see") == ["Let me see"]
    assert parser.feed(" <tool") == []
    assert parser.feed("box>") == [" <toolbox>"]


def test_calls_come_as_soon_as_they_are_complete():
    parser = MarkedCalls(SYNTAXES["hermes"], {})
    (call,) = parser.feed(HERMES)
    assert call.name == "weather"
    listed = CallList()
    assert listed.feed('[{"name": "clock", "parameters": {"a": "]}\\""}}') == [
        ToolCall("clock", '{"a": "]}\\""}')
    ]
    assert listed.feed(', {"name": "weather", "parameters": {"city"') == []
    assert listed.finish() == []  # cut short


def test_a_named_call_is_the_whole_text():
    assert gathered(NamedCall("weather"), cuts(' {"city": "Oslo", "days": 3}\n', 1)) == ("", [OSLO])
