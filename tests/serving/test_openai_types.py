"""Every kind of response against the openai package's own types, strictly, extras and all."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from tests.serving.conftest import serving
from tests.serving.fakes import FakeEngine, WordTokenizer

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
MESSAGES = [{"role": "user", "content": "1"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.fixture(scope="module")
def calling():
    """A server whose model says something and then calls a tool."""
    engine = FakeEngine()
    engine.script = ["So: ", *CALL]
    with serving(engine, WordTokenizer()) as running:
        yield running


def strictly(model: type[BaseModel], value: Any) -> BaseModel:
    """Validate without any conversion, and without fields that hold what they may not."""
    parsed = model.model_validate(value, strict=True)
    assert parsed.to_dict(mode="json", exclude_unset=True) == value
    return parsed


def events(answer):
    lines = [line for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def without_first_nulls(answer, case):
    """The first token of a prompt has no logprob: OpenAI's API says null, its types do not."""
    for choice in answer["choices"]:
        if case["echo"] and choice["logprobs"] is not None:
            lists = choice["logprobs"]
            assert (lists["token_logprobs"][0], lists["top_logprobs"][0]) == (None, None)
            lists["token_logprobs"][0], lists["top_logprobs"][0] = 0.0, {}
    return answer


COMPLETIONS = [
    dict(zip(("n", "logprobs", "echo", "usage"), values, strict=True))
    for values in itertools.product((1, 2), (None, 0, 3), (False, True), (None, "last", "every"))
]


@pytest.mark.parametrize("case", COMPLETIONS, ids=str)
def test_completions(served, case):
    body = {"prompt": ["1 2", "3"], "max_tokens": 3, "n": case["n"], "echo": case["echo"]}
    if case["logprobs"] is not None:
        body["logprobs"] = case["logprobs"]
    answer = served.http.post("/v1/completions", json=body).json()
    strictly(Completion, without_first_nulls(answer, case))
    every = case["usage"] == "every"
    if case["usage"]:
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": every}
    streamed = events(served.http.post("/v1/completions", json=body | {"stream": True}))
    opened = set()
    for event in streamed:
        if opened.isdisjoint(indices := {choice["index"] for choice in event["choices"]}):
            without_first_nulls(event, case)
            opened |= indices
        # The package has one type for both, which states a finish_reason that chunks lack.
        for choice in event["choices"]:
            assert choice["finish_reason"] in (None, "length", "stop")
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        strictly(Completion, event)


CHATS = [
    dict(zip(("n", "logprobs", "tools", "usage"), values, strict=True))
    for values in itertools.product((1, 2), (None, 0, 3), (False, True), (None, "last", "every"))
]


@pytest.mark.parametrize("case", CHATS, ids=str)
def test_chats(calling, case):
    body = {"messages": MESSAGES, "n": case["n"]}
    if case["logprobs"] is not None:
        body |= {"logprobs": True, "top_logprobs": case["logprobs"]}
    if case["tools"]:
        body["tools"] = TOOLS
    answer = calling.http.post("/v1/chat/completions", json=body)
    parsed = strictly(ChatCompletion, answer.json())
    assert bool(parsed.choices[0].message.tool_calls) == case["tools"]
    every = case["usage"] == "every"
    if case["usage"]:
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": every}
    streamed = events(calling.http.post("/v1/chat/completions", json=body | {"stream": True}))
    for event in streamed:
        strictly(ChatCompletionChunk, event)
    assert (streamed[-1]["choices"] == []) == bool(case["usage"])


def test_models(served):
    listed = served.http.get("/v1/models").json()
    assert listed["object"] == "list"
    for card in listed["data"]:
        strictly(Model, card)
        strictly(Model, served.http.get(f"/v1/models/{card['id']}").json())
