"""`/v1/chat/completions` through the openai package."""

from __future__ import annotations

import asyncio

import openai
import pytest

from pw.models.resolve import resolve_model
from pw.models.tokenizer import load_tokenizer
from tests.serving.conftest import serving
from tests.serving.fakes import STORY, FakeEngine

TEXT = {"type": "text", "text": "1"}
ASK = [{"role": "user", "content": "lazy dog,"}]


def test_answer(served):
    answer = served.openai.chat.completions.create(model="fake", messages=ASK, max_tokens=3)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "The 🦊 jumps ")
    assert (choice.finish_reason, choice.logprobs) == ("length", None)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 3)


def test_content_parts_and_later_limit_field(served):
    served.engine.calls.clear()
    answer = served.openai.chat.completions.create(
        model="fake",
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "1"}]},
            {"role": "assistant", "content": None, "tool_calls": []},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "2", "cache_control": {"type": "ephemeral"}},
                    {"type": "text", "text": "3"},
                ],
            },
        ],
        max_tokens=9,
        max_completion_tokens=2,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )
    ((ids, _),) = served.engine.calls.values()
    assert ids == [1, 2, 3]
    assert answer.usage.completion_tokens == 2


@pytest.mark.parametrize("n", [1, 3])
def test_stream(served, n):
    whole = served.openai.chat.completions.create(model="fake", messages=ASK, n=n, seed=4)
    by_index = {index: [] for index in range(n)}
    with served.openai.chat.completions.create(
        model="fake", messages=ASK, n=n, seed=4, stream=True
    ) as stream:
        for chunk in stream:
            assert chunk.object == "chat.completion.chunk"
            (choice,) = chunk.choices
            by_index[choice.index].append(choice)
    for index, choices in by_index.items():
        assert (choices[0].delta.role, choices[0].delta.content) == ("assistant", "")
        assert [choice.finish_reason for choice in choices[:-1]] == [None] * (len(choices) - 1)
        assert choices[-1].finish_reason == "stop"
        assert choices[-1].delta.content is None
        text = "".join(choice.delta.content or "" for choice in choices)
        assert text == whole.choices[index].message.content


@pytest.mark.parametrize(
    ("options", "usages"),
    [
        (None, None),
        ({"include_usage": False}, None),
        ({"include_usage": True}, [None, None, None, None, 2]),
        ({"include_usage": True, "continuous_usage_stats": True}, [1, 1, 2, 2, 2]),
        ({"include_usage": True, "an_option_of_tomorrow": 1}, [None, None, None, None, 2]),
        ({"continuous_usage_stats": True}, None),
    ],
)
def test_usage_chunk_only_when_asked(served, options, usages):
    chunks = list(
        served.openai.chat.completions.create(
            model="fake", messages=ASK, max_tokens=2, stream=True, stream_options=options
        )
    )
    if usages is None:
        assert [len(chunk.choices) for chunk in chunks] == [1, 1, 1, 1]
        assert not any(chunk.usage for chunk in chunks)
        return
    assert [len(chunk.choices) for chunk in chunks] == [1, 1, 1, 1, 0]
    assert [chunk.usage and chunk.usage.completion_tokens for chunk in chunks] == usages
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.total_tokens) == (2, 4)


def test_logprobs(served):
    fields = {"messages": ASK, "max_tokens": 2, "logprobs": True, "top_logprobs": 3}
    answer = served.openai.chat.completions.create(model="fake", **fields)
    content = answer.choices[0].logprobs.content
    assert [entry.token for entry in content] == ["The ", "🦊 "]
    assert bytes(content[1].bytes).decode() == "🦊 "
    assert [top.logprob for top in content[0].top_logprobs] == [0.0, -0.25, -9999.0]
    stream = served.openai.chat.completions.create(model="fake", **fields, stream=True)
    pieces = [chunk.choices[0].logprobs for chunk in stream]
    assert [entry for piece in pieces if piece for entry in piece.content] == content


def test_async_stream(served):
    async def ask():
        async with (
            served.async_openai() as client,
            await client.chat.completions.create(
                model="fake", messages=ASK, stream=True, max_tokens=5
            ) as stream,
        ):
            return [chunk.choices[0].delta.content or "" async for chunk in stream]

    assert "".join(asyncio.run(ask())) == "".join(word + " " for word in STORY[:5])


def test_stream_on_the_wire(served):
    body = {"model": "fake", "messages": ASK, "stream": True, "max_tokens": 1}
    answer = served.http.post("/v1/chat/completions", json=body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith('data: {"') for event in events[:-2])


def test_what_an_assistant_refused_with_is_text(served):
    part = {"type": "refusal", "refusal": "1 2"}
    messages = [*ASK, {"role": "assistant", "content": [part]}, *ASK]
    fields = {"model": "fake", "max_tokens": 1, "top_logprobs": 0}  # which asks for nothing
    answer = served.openai.chat.completions.create(messages=messages, **fields)
    assert answer.choices[0].message.content


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([{"role": "system", "content": "x"}], "System role not supported"),
        ([], "messages"),
        ([{"role": "user", "content": ""}], "empty prompt"),
        (
            [{"role": "user", "content": [TEXT, {"type": "image_url", "image_url": {}}]}],
            "messages.0.content.1: image parts are not supported",
        ),
        ([{"role": "user", "content": [{"type": "poem"}]}], "'text'"),
        ([{"content": "who?"}], "role"),
        ("hello", "list"),
    ],
)
def test_messages_that_cannot_be_served(served, messages, sentence):
    with pytest.raises(openai.BadRequestError, match=sentence) as caught:
        served.openai.chat.completions.create(model="fake", messages=messages)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("name", ["tokenize", "chat_template", "return_tensors"])
def test_template_keywords_cannot_reach_past_the_template(served, name):
    with pytest.raises(openai.BadRequestError, match=name):
        served.openai.chat.completions.create(
            model="fake", messages=ASK, extra_body={"chat_template_kwargs": {name: "x"}}
        )


@pytest.fixture(scope="module")
def templated():
    """The bundled model's tokenizer, whose template tests replace, before a fake engine."""
    with serving(FakeEngine(), load_tokenizer(resolve_model("tiny"))) as running:
        yield running


MIXTRAL = """{{ bos_token }}{% for m in messages %}
{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}{{ m['content'] }}{% endfor %}"""
GEMMA = """{% if messages[0]['role'] == 'system' %}
{{ raise_exception('System role not supported') }}{% endif %}{{ messages[0]['content'] }}"""
SYSTEM = {"role": "system", "content": "be brief"}
USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "hello"}
TOOL = {"role": "tool", "content": "5", "tool_call_id": "a"}


@pytest.mark.parametrize(
    ("template", "messages", "sentence"),
    [
        (MIXTRAL, [SYSTEM, USER], "roles must alternate"),
        (MIXTRAL, [USER, USER], "roles must alternate"),
        (MIXTRAL, [ASSISTANT, USER], "roles must alternate"),
        (MIXTRAL, [USER, TOOL, USER], None),
        (MIXTRAL, [USER, ASSISTANT, TOOL], "roles must alternate"),
        (GEMMA, [SYSTEM, USER], "System role not supported"),
        (GEMMA, [{"role": "developer", "content": "x"}, USER], "System role not supported"),
        (GEMMA, [USER, USER], None),
        (None, [USER], "no chat template"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_templates_refuse_in_their_own_words(templated, template, messages, sentence, stream):
    templated.context.encoder._tokenizer.inner.chat_template = template
    body = {"messages": messages, "max_tokens": 1, "stream": stream}
    answer = templated.http.post("/v1/chat/completions", json=body)
    if sentence is None:
        assert answer.status_code == 200, answer.text
        return
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert sentence in error["message"]
    assert "hint" in error["message"]
    assert error["param"] == "messages"


@pytest.mark.parametrize("role", ["nobody", "", "function", None, 5])
def test_unknown_roles(served, role):
    body = {"messages": [{"role": role, "content": "1"}]}
    answer = served.http.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


@pytest.mark.parametrize("text", ["1 2", None])
def test_nulls_are_as_good_as_absent(served, text):
    served.engine.calls.clear()
    names = ("stop", "seed", "tools", "logprobs", "stream", "n", "response_format", "logit_bias")
    body = {"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": text}]}
    body |= dict.fromkeys(names) | {"max_tokens": 1, "min_tokens": None, "ignore_eos": None}
    assert served.http.post("/v1/chat/completions", json=body).status_code == 200
