"""LiteLLM as a library: chat and text, whole and streamed, errors with their meaning."""

from __future__ import annotations

from typing import Any

import pytest

litellm = pytest.importorskip("litellm")

ASK = [{"role": "user", "content": "Why is the sky blue?"}]


@pytest.fixture
def settings(url: str) -> dict[str, Any]:
    return {"api_base": f"{url}/v1", "api_key": "none", "max_tokens": 12, "temperature": 0}


def test_chat(settings: dict[str, Any]) -> None:
    answer = litellm.completion(model="openai/tiny", messages=ASK, **settings)
    assert answer.usage.completion_tokens <= 12
    chunks = litellm.completion(
        model="openai/tiny", messages=ASK, stream=True,
        stream_options={"include_usage": True}, **settings,
    )  # fmt: skip
    text, usage = "", None
    for chunk in chunks:
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
        usage = getattr(chunk, "usage", None) or usage
    assert text == answer.choices[0].message.content
    assert usage.completion_tokens == answer.usage.completion_tokens


def test_text(settings: dict[str, Any]) -> None:
    answer = litellm.text_completion(
        model="text-completion-openai/tiny", prompt="The sky is", **settings
    )
    assert answer.choices[0].text
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_errors(settings: dict[str, Any]) -> None:
    with pytest.raises(litellm.exceptions.ContextWindowExceededError):
        litellm.completion(model="openai/tiny", messages=ASK, **settings | {"max_tokens": 99_999})
    with pytest.raises(litellm.exceptions.NotFoundError):
        litellm.completion(model="openai/other", messages=ASK, **settings)
    with pytest.raises(litellm.exceptions.BadRequestError):
        litellm.completion(model="openai/tiny", messages=ASK, **settings | {"temperature": 9})
