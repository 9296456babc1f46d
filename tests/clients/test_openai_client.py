"""openai-python against the real server: sync, async, streamed, and what its retries meet."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

ASK = [{"role": "user", "content": "Why is the sky blue?"}]


def test_sync_async_and_streams_agree(url: str) -> None:
    settings = {"model": "tiny", "messages": ASK, "max_tokens": 16, "temperature": 0}
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    whole = client.chat.completions.create(**settings).choices[0].message.content
    streamed = client.chat.completions.create(**settings, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == whole

    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            stream = await client.chat.completions.create(**settings, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(ask()) == whole
    client.close()


def test_parsed_output(url: str) -> None:
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["blue", "red"]}},
        "required": ["colour"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "c", "strict": True, "schema": schema}}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        answer = client.chat.completions.create(
            model="tiny", messages=ASK, max_tokens=200, temperature=0, response_format=form
        )
    assert json.loads(answer.choices[0].message.content)["colour"] in ("blue", "red")


def test_errors_are_not_retried(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="tiny", prompt="x", temperature=9)
        assert caught.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("other")
