"""Tools through the openai package: what the template gets, what comes back, whole and streamed."""

from __future__ import annotations

import json
from pathlib import Path

import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

import pw
from pw.errors import ConfigError
from pw.models.tokenizer import load_tokenizer
from pw.serving.context import ServingConfig
from pw.serving.openai.tools import ToolSettings
from tests.serving.conftest import serving
from tests.serving.fakes import FakeEngine, WordTokenizer

TINY = Path(pw.__file__).parent / "assets" / "moe-tiny"
ASK = [{"role": "user", "content": "1 2"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def tool(name, **properties):
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("weather", city={"type": "string"}), tool("clock")]


class Watched(WordTokenizer):
    """Keeps what the template was given."""

    def __init__(self):
        self.seen = []

    def render_chat(self, messages, **options):
        self.seen.append((messages, options))
        return "1 2"


@pytest.fixture(scope="module")
def running():
    with serving(FakeEngine(), Watched()) as running:
        running.context.grammars.check = accept_all
        yield running


@pytest.fixture
def served(running):
    running.engine.calls.clear()
    return running


async def accept_all(grammar, param):
    """Stands for the compiler, which has tests of its own."""


def seen(served):
    return served.context.encoder._tokenizer.seen


def create(served, text, **fields):
    served.engine.script = [text[at : at + 3] for at in range(0, len(text), 3)]
    fields = {"messages": ASK, "tools": TOOLS} | fields
    return served.openai.chat.completions.create(model="fake", **fields)


def both(served, text, **fields):
    """The answer of a request, after the openai package has put its stream together to the same."""
    whole = create(served, text, **fields).choices
    state = ChatCompletionStreamState()
    for chunk in create(served, text, stream=True, **fields):
        state.handle_chunk(chunk)
        for call in chunk.choices[0].delta.tool_calls or []:
            first = call.id is not None  # says all but the arguments, the others nothing else
            assert (call.type, bool(call.function.name)) == (("function" if first else None), first)
            assert (call.function.arguments == "") is first
    for choice, streamed in zip(whole, state.current_completion_snapshot.choices, strict=True):
        assert (streamed.message.content or "") == (choice.message.content or "")
        assert streamed.finish_reason == choice.finish_reason
        assert [
            (call.function.name, call.function.arguments)
            for call in streamed.message.tool_calls or []
        ] == [
            (call.function.name, call.function.arguments)
            for call in choice.message.tool_calls or []
        ]
    return whole


def calls_of(choice):
    return [(c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls]


def test_a_call(served):
    (choice,) = both(served, f"I will look.\n{CALL}")
    assert choice.message.content == "I will look."
    assert calls_of(choice) == [("weather", {"city": "Oslo"})]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls[0].type == "function"
    _, options = seen(served)[-1]
    assert [each["function"]["name"] for each in options["tools"]] == ["weather", "clock"]


def test_several_calls_have_ids_of_their_own(served):
    (choice,) = both(served, CALL + CALL)
    assert choice.message.content is None
    ids = {call.id for call in choice.message.tool_calls}
    assert len(ids) == 2
    assert all(len(each) == 9 and each.isalnum() for each in ids)
    (choice,) = both(served, CALL + CALL, parallel_tool_calls=False)
    assert calls_of(choice) == [("weather", {"city": "Oslo"})]


def test_a_model_may_just_answer(served):
    (choice,) = both(served, "It is cold.")
    assert (choice.message.content, choice.message.tool_calls) == ("It is cold.", None)
    assert choice.finish_reason == "stop"


def test_an_answer_cut_short_says_so(served):
    (choice,) = both(served, f"{CALL}", max_tokens=5)
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls is None


def test_logprobs_beside_calls(served):
    fields = {"logprobs": True, "top_logprobs": 1}
    whole = create(served, f"Hm {CALL}", **fields).choices[0].logprobs.content
    chunks = create(served, f"Hm {CALL}", stream=True, **fields)
    logprobs = [chunk.choices[0].logprobs for chunk in chunks]
    assert [entry for each in logprobs if each for entry in each.content] == whole


def test_choice_none_hides_the_tools(served):
    (choice,) = both(served, CALL, tool_choice="none")
    assert choice.message.content == CALL
    assert "tools" not in seen(served)[-1][1]


def test_required_binds_the_answer_to_a_list_of_calls(served):
    text = (
        '[{"name": "weather", "parameters": {"city": "Oslo"}}, {"name": "clock", "parameters": {}}]'
    )
    (choice,) = both(served, text, tool_choice="required")
    assert calls_of(choice) == [("weather", {"city": "Oslo"}), ("clock", {})]
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    grammar = last_grammar(served)
    assert (grammar["type"], grammar["minItems"]) == ("array", 1)
    names = [each["properties"]["name"] for each in grammar["items"]["anyOf"]]
    assert names == [{"const": "weather"}, {"const": "clock"}]
    create(served, text, tool_choice="required", parallel_tool_calls=False)
    assert last_grammar(served)["maxItems"] == 1


def test_a_named_function_binds_the_answer_to_its_arguments(served):
    choice = {"type": "function", "function": {"name": "weather"}}
    (answer,) = both(served, '{"city": "Oslo"}', tool_choice=choice)
    assert calls_of(answer) == [("weather", {"city": "Oslo"})]
    assert last_grammar(served)["properties"] == {"city": {"type": "string"}}


def last_grammar(served):
    _, params = list(served.engine.calls.values())[-1]
    assert params.grammar.kind == "json_schema"
    return json.loads(params.grammar.text)


def test_definitions_move_to_the_root(served):
    place = {"$defs": {"place": {"type": "string"}}}
    first = tool("weather", city={"$ref": "#/$defs/place"})
    first["function"]["parameters"] |= place
    second = tool("clock", city={"$ref": "#/$defs/place"})
    second["function"]["parameters"] |= place
    create(served, "[]", tools=[first, second], tool_choice="required")
    assert last_grammar(served)["$defs"] == {"place": {"type": "string"}}
    second["function"]["parameters"]["$defs"] = {"place": {"type": "integer"}}
    with pytest.raises(openai.BadRequestError, match="differently"):
        create(served, "[]", tools=[first, second], tool_choice="required")


def test_earlier_calls_reach_the_template_as_objects(served):
    earlier = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    messages = [
        *ASK,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "a", "type": "function", "function": earlier}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "cold"},
    ]
    create(served, "x", messages=messages)
    (_, assistant, result), _ = seen(served)[-1]
    assert assistant["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}
    assert assistant["content"] == ""
    assert (result["role"], result["tool_call_id"]) == ("tool", "a")
    earlier["arguments"] = '{"city": "Os'  # cut short
    create(served, "x", messages=messages)
    assert seen(served)[-1][0][1]["tool_calls"][0]["function"]["arguments"] == '{"city": "Os'
    earlier["arguments"] = "[1]"
    with pytest.raises(openai.BadRequestError, match="must be a JSON object"):
        create(served, "x", messages=messages)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [tool(f"f{i}") for i in range(129)]}, "tools"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [tool("f", a={"not": {}})], "tool_choice": "required"}, "tools"),
        ({"response_format": {"type": "json_object"}}, "tool_choice"),
    ],
)
def test_tools_that_cannot_be_used(served, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        create(served, "x", **fields)
    assert caught.value.param == param
    assert not served.engine.calls


def test_auto_needs_a_parser(start):
    with (
        start(config=ServingConfig(("fake",), auto_tool_choice=False)) as served,
        pytest.raises(openai.BadRequestError, match="--enable-auto-tool-choice"),
    ):
        create(served, "x")


def test_the_template_tells_the_syntax():
    tokenizer = WordTokenizer()
    assert ToolSettings.of_model(tokenizer).syntax.begin == "<tool_call>"
    tokenizer.chat_template = "{{ messages }}"
    assert ToolSettings.of_model(tokenizer).syntax is None
    assert ToolSettings.of_model(tokenizer, "mistral").syntax.begin == "[TOOL_CALLS]"
    with pytest.raises(ConfigError, match="hermes"):
        ServingConfig(("fake",), tool_call_parser="other")


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_template_without_tools_refuses_whatever_the_choice(start, choice):
    """The bundled model's: the tokenizer's own sentence, not one about parsers."""
    with start(FakeEngine(), load_tokenizer(TINY)) as served:
        served.context.grammars.check = accept_all
        with pytest.raises(openai.BadRequestError, match="template knows no tools") as caught:
            create(served, "x", tool_choice=choice)
        assert caught.value.param == "tools"


def test_marks_that_are_special_tokens_are_kept(start):
    class Special(WordTokenizer):
        def is_special(self, text):
            return text == "<tool_call>"

    with start(FakeEngine(), Special()) as served:
        for choice, skipped in (("auto", False), ("none", True)):
            create(served, "x", tool_choice=choice)
            _, params = list(served.engine.calls.values())[-1]
            assert params.skip_special_tokens is skipped
