"""JSON on the wire: one value is one line, by every client's idea of a line."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from pw.serving.wire import dumps
from tests.serving.conftest import Served

LINE_ENDS = "\u2028 \u2029 \x85 \n \r \v \f \x1c \x1d \x1e"
NEIGHBOURS = "\u2027 \u202a \x84 \x86 \u00e2\u0080 \u4e00 🦊"  # share bytes with them


@pytest.mark.parametrize("text", [LINE_ENDS, NEIGHBOURS, "\\u2028", "plain"])
def test_a_value_is_one_line_and_means_the_same(text: str) -> None:
    value = {"text": text, text: [text]}
    data = dumps(value)
    assert json.loads(data) == value
    assert data.decode().splitlines() == [data.decode()]
    assert data.splitlines() == [data]


def test_other_text_stays_as_it_is() -> None:
    assert dumps(NEIGHBOURS[2:]).decode() == json.dumps(NEIGHBOURS[2:], ensure_ascii=False)
    assert dumps({1: float("nan")}) == b'{"1":null}'


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_clients_that_split_lines_read_whole_events(served: Served, path: str) -> None:
    """`aiter_lines` splits as `str.splitlines` does."""
    pieces = ["a\u2028b", "\u2029", "\x85c", "d\n\re"]
    body = {"prompt": "1", "messages": [{"role": "user", "content": "1"}], "stream": True}

    async def texts() -> list[str]:
        found = []
        async with (
            httpx.AsyncClient(base_url=served.url, timeout=60) as client,
            client.stream("POST", path, json=body) as answer,
        ):
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    [choice] = json.loads(line.removeprefix("data: "))["choices"]
                    found.append(choice["text"] if "text" in choice else choice["delta"])
        return [text if isinstance(text, str) else text.get("content", "") for text in found]

    served.engine.script = pieces
    try:
        assert [text for text in asyncio.run(texts()) if text] == pieces
        whole = served.http.post(path, json=body | {"stream": False})
    finally:
        served.engine.script = []
    [choice] = whole.json()["choices"]
    assert choice.get("text", choice.get("message", {}).get("content")) == "".join(pieces)
    assert len(whole.text.splitlines()) == 1
