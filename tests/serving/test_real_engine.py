"""The whole way: openai client, HTTP, engine, planes that move while requests run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from pw.engine import AsyncEngine, Engine
from pw.engine.request import RequestOutput
from pw.errors import EngineLostError
from support.engines import make_artifact, open_engine, random_prompt, tight_budget
from tests.serving.conftest import wait_for

PROMPT_TOKENS, NEW_TOKENS = 60, 24


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serving")
    return make_artifact("qwen2_moe", folder, num_attention_heads=2)[1]


@pytest.fixture
def served(artifact: Path, start: Callable[..., Any]) -> Iterator[Any]:
    """A server whose widest experts and a few of the requests below do not fit together."""
    budget = tight_budget(artifact, kv_tokens=2 * (PROMPT_TOKENS + NEW_TOKENS))
    engine = open_engine(artifact, memory_budget=budget, planner_low_watermark=0.01)
    with start(AsyncEngine(engine), engine.tokenizer) as running:
        yield running
    engine.check_integrity()
    assert engine.status().pages_kv == 0


def ask(client: openai.OpenAI, prompt: Any, **options: Any) -> Any:
    settings: dict[str, Any] = {"model": "fake", "temperature": 0, "max_tokens": NEW_TOKENS}
    extra = {"ignore_eos": True}
    return client.completions.create(prompt=prompt, extra_body=extra, **(settings | options))


def test_requests_under_pressure_all_finish_and_bits_come_back(served: Any) -> None:
    async def load() -> list[Any]:
        async with served.async_openai() as client:
            return await asyncio.gather(
                *(
                    client.completions.create(
                        model="fake",
                        prompt=random_prompt(PROMPT_TOKENS + 10 * seed, seed),
                        max_tokens=NEW_TOKENS,
                        temperature=0,
                        extra_body={"ignore_eos": True},
                    )
                    for seed in range(12)
                )
            )

    answers = asyncio.run(load())
    assert [a.choices[0].finish_reason for a in answers] == ["length"] * 12
    assert all(a.usage.completion_tokens == NEW_TOKENS for a in answers)
    status = served.http.get("/v1/pw/status").json()
    assert status["bytes_over_budget"] == 0
    assert status["finished"] == 12
    assert status["transitions"] > 0
    reduced = [plan for plan in status["plan_history"] if plan["damage"] > 0]
    assert reduced
    wait_for(lambda: served.http.get("/v1/pw/status").json()["mean_bits"] == 6)


def test_stream_equals_the_whole_answer_and_seeds_repeat(served: Any) -> None:
    whole = ask(served.openai, "The sea", temperature=0.7, seed=5).choices[0].text
    chunks = ask(served.openai, "The sea", temperature=0.7, seed=5, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole
    both = ask(served.openai, "The sea", temperature=0.7, seed=5, n=2).choices
    assert both[0].text == whole
    assert both[1].text != whole


def test_bad_input_is_a_400_and_the_engine_lives_on(served: Any) -> None:
    limit = served.http.get("/v1/models").json()["data"][0]["max_model_len"]
    with pytest.raises(openai.BadRequestError, match="maximum context length is") as refused:
        ask(served.openai, [5] * limit)
    assert refused.value.code == "context_length_exceeded"
    for body in ({"prompt": [999]}, {"prompt": []}, {"prompt": "x", "temperature": -1}, {}):
        response = served.http.post("/v1/completions", json={"model": "fake", **body})
        assert response.status_code == 400, response.text
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert ask(served.openai, "still here").choices[0].finish_reason == "length"


def says_one_thing(engine: Engine) -> None:
    """From the next text on the engine makes no steps: who streams waits for more."""
    step, said = engine.step, threading.Event()

    def once() -> list[RequestOutput]:
        if said.wait(0.001):
            return []
        outputs = step()
        if any(output.text for output in outputs):
            said.set()
        return outputs

    engine.step = once  # type: ignore[method-assign]


def test_a_client_that_leaves_gives_its_pages_back(served: Any) -> None:
    says_one_thing(served.engine.engine)
    with ask(served.openai, "a long one", max_tokens=120, stream=True) as stream:
        next(iter(stream))

    def idle() -> bool:
        status = served.http.get("/v1/pw/status").json()
        return bool(status["pages_kv"] == 0 and status["running"] == 0)

    wait_for(idle)
    assert served.http.get("/v1/pw/status").json()["aborted"] == 1


def test_an_engine_that_fails_ends_its_streams_and_says_so(
    artifact: Path, start: Callable[..., Any]
) -> None:
    engine = open_engine(artifact, "static:3")
    says_one_thing(engine)
    with start(AsyncEngine(engine), engine.tokenizer) as running:
        stream = ask(running.openai, "hello", max_tokens=150, stream=True)
        next(iter(stream))

        def broken() -> Any:
            raise EngineLostError("a fault made by the test")

        engine.step = broken  # type: ignore[method-assign]
        with pytest.raises(openai.APIError, match="engine failed"):
            for _ in stream:
                pass
        assert running.http.get("/health").status_code == 503
        with pytest.raises(openai.InternalServerError):
            ask(running.openai, "anyone there?")
