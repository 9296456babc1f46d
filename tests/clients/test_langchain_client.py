"""langchain-openai: answers, streams, usage, structured output, tools."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("langchain_openai")

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field, SecretStr


@tool
def weather(city: str, days: int) -> str:
    """Tell the weather of a city."""
    return f"{city}: cold for {days} days"


class Person(BaseModel):
    """Somebody."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


@pytest.fixture
def chat(url: str) -> ChatOpenAI:
    return ChatOpenAI(
        model="tiny", base_url=f"{url}/v1", api_key=SecretStr("none"), max_retries=0,
        max_completion_tokens=200, temperature=0, seed=1,
    )  # fmt: skip


def test_answer_and_usage(chat: ChatOpenAI) -> None:
    answer = chat.invoke("Why is the sky blue?")
    usage = answer.usage_metadata
    assert usage is not None
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert answer.response_metadata["system_fingerprint"].endswith("static-4")
    chunks = list(chat.stream("Why is the sky blue?", stream_usage=True))
    assert "".join(str(chunk.content) for chunk in chunks) == answer.content
    streamed = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert streamed[-1]["output_tokens"] == usage["output_tokens"]


def test_async_and_batches(chat: ChatOpenAI) -> None:
    questions = ["Who?", "Where?", "When?"]
    assert [a.content for a in asyncio.run(chat.abatch(questions))] == [
        chat.invoke(question).content for question in questions
    ]


def test_structured_output(chat: ChatOpenAI) -> None:
    found = chat.with_structured_output(Person, method="json_schema").invoke("Name somebody.")
    assert isinstance(found, Person)


def test_tools(chat: ChatOpenAI) -> None:
    asked = HumanMessage("How is the weather in Oslo?")
    answer = chat.bind_tools([weather], tool_choice="required").invoke([asked])
    (call,) = answer.tool_calls[:1]
    assert call["name"] == "weather"
    assert set(call["args"]) == {"city", "days"}
    results = [ToolMessage("cold", tool_call_id=call["id"]) for call in answer.tool_calls]
    chat.bind_tools([weather], tool_choice="none").invoke([asked, answer, *results])


def test_completions(url: str) -> None:
    model = OpenAI(
        model="tiny", base_url=f"{url}/v1", api_key=SecretStr("none"), max_tokens=8, temperature=0
    )
    text = model.invoke("The sky is")
    assert text == "".join(model.stream("The sky is"))
