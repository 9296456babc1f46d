import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from pw.errors import PwError
from pw.evaluation.demo.load import Answer, Passages, Wave, run_wave, send
from pw.evaluation.demo.process import run_command, serving
from pw.evaluation.demo.settings import LOAD_SHARE, heldout_documents
from pw.evaluation.demo.timeline import Observer
from support.demo import status_json
from support.patience import PATIENCE


def stream(*chunks: dict[str, Any]) -> httpx.Response:
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return httpx.Response(200, text="".join([*lines, "data: [DONE]\n\n"]))


def chunk(text: str, finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"text": text, "finish_reason": finish, **more}]}


def client_of(handler: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url="http://demo")


def ask(handler: Any, **options: Any) -> Answer:
    async def go() -> Answer:
        async with client_of(handler) as client:
            return await send(client, "prompt", 2, **options)

    return asyncio.run(go())


def test_a_stream_is_put_together() -> None:
    bodies: list[dict[str, Any]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return stream(
            chunk("a", logprobs={"token_logprobs": [-0.5]}),
            chunk("b", "length", logprobs={"token_logprobs": [-0.25]}),
            {"choices": [], "usage": {"completion_tokens": 2}},
        )

    answer = ask(handler, seed=5, temperature=0.8, logprobs=True)
    assert (answer.text, answer.tokens_made, answer.logprobs) == ("ab", 2, (-0.5, -0.25))
    assert answer.finished
    assert bodies[0]["prompt"] == "prompt"
    assert (bodies[0]["seed"], bodies[0]["max_tokens"], bodies[0]["stream"]) == (5, 2, True)


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (httpx.Response(503, text="queue is full"), "HTTP 503: queue is full"),
        (stream(chunk("a"), {"error": {"message": "engine failed"}}), "engine failed"),
        (httpx.Response(200, text="data: {half\n\n"), "JSONDecodeError"),
    ],
)
def test_what_goes_wrong_is_in_the_answer(reply: httpx.Response, error: str) -> None:
    answer = ask(lambda _request: reply)
    assert not answer.finished
    assert error in (answer.error or "")


def test_a_lost_connection_is_an_error_too() -> None:
    def handler(_request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    assert ask(handler).error == "ConnectError: refused"


def test_a_stream_that_ends_early_is_not_finished() -> None:
    answer = ask(lambda _request: stream(chunk("a")))
    assert (answer.error, answer.finished) == (None, False)


def test_contexts_grow_by_the_answer_and_the_next_passage() -> None:
    prompts: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        prompts.append(json.loads(request.content)["prompt"])
        return stream(chunk("<answer>", "length"))

    done: list[Answer] = []
    wave = Wave("w", clients=2, turns=3, passage_tokens=1, answer_tokens=4, think_seconds=0)

    async def go() -> None:
        async with client_of(handler) as client:
            await run_wave(client, wave, Passages(["abcdefghi", "123456789"]), 0, done.append)

    asyncio.run(go())
    assert len(done) == wave.requests == 6
    for first, text in (("a", "abc<answer>def<answer>ghi"), ("1", "123<answer>456<answer>789")):
        mine = [prompt for prompt in prompts if prompt[0] == first]
        assert mine == [text[:3], text[:14], text]


def test_passages_begin_again_at_the_end_of_a_document() -> None:
    read = Passages(["abcdefgh"]).new_client()
    assert [read(1), read(1), read(1)] == ["abc", "def", "abc"]


def test_the_load_and_the_score_use_different_documents() -> None:
    load, scored = heldout_documents()
    assert len(load) == -(-(len(load) + len(scored)) // LOAD_SHARE)
    assert not set(load) & set(scored)


def test_the_observer_settles_when_bits_are_back() -> None:
    bits = iter([6.0, 3.0, 3.0, *[6.0] * 1000])
    running = iter([0, 1, 0, 1, *[0] * 1000])

    def handler(_request: httpx.Request) -> httpx.Response:
        status = status_json(mean_bits=next(bits), running=next(running))
        return httpx.Response(200, json=status)

    async def go() -> Observer:
        shown: list[int] = []
        async with client_of(handler) as client:
            observer = Observer(client, lambda line: shown.append(len(line.samples)), 0.001)
            following = asyncio.create_task(observer.follow())
            await asyncio.sleep(0)
            assert await observer.settle(6.0, timeout=PATIENCE)
            assert len(observer.timeline.samples) >= 5
            assert not await observer.settle(7.0, timeout=0.01)
            following.cancel()
        assert shown == list(range(1, len(shown) + 1))
        return observer

    assert asyncio.run(go()).timeline.least_bits() == 3.0


def test_a_command_that_fails_and_a_server_that_does_not_start(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(PwError, match="`pw inspect` ended with exit code"):
        run_command(["inspect", str(tmp_path / "none.pw")])
    assert "$ pw inspect" in capfd.readouterr().out
    log = tmp_path / "server.log"
    with (
        pytest.raises(PwError, match=r"did not start: hint: make it"),
        serving([str(tmp_path / "none.pw")], log),
    ):
        pass
    assert "no such artifact" in log.read_text()
