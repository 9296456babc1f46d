"""The engine's thread: who waits always gets an end, whatever happens."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pw.engine import AsyncEngine, Engine, async_engine
from pw.engine.process import loop as turns
from pw.engine.request import RequestOutput, SamplingParams
from pw.errors import EngineLostError, RequestError
from support.engines import open_engine, random_prompt
from support.patience import PATIENCE
from support.remote import until

LONG = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def shared(qwen: tuple[Any, Path]) -> Engine:
    return open_engine(qwen[1], "static:3", max_num_seqs=2)


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    """An engine that each test leaves without requests, pages or patches."""
    yield shared
    for name in ("step", "add_request", "abort"):
        shared.__dict__.pop(name, None)
    for name in list(shared._sequences):
        shared.abort(name)
    shared.check_integrity()
    assert shared.status().pages_kv == 0


async def outputs(engine: AsyncEngine, name: str, params: SamplingParams) -> list[RequestOutput]:
    return [output async for output in engine.generate(name, random_prompt(40, 1), params)]


def run(
    engine: Engine, work: Callable[[AsyncEngine], Awaitable[Any]], drain: float = 0, **options: Any
) -> Any:
    """Do something with a started AsyncEngine, then shut it down."""

    async def whole() -> Any:
        served = AsyncEngine(engine, **options)
        served.start()
        try:
            return await asyncio.wait_for(work(served), 1.5 * PATIENCE)
        finally:
            await served.shutdown(drain)
            assert not served._thread.is_alive()
            assert not served.healthy()

    return asyncio.run(whole())


def test_streams_of_several_requests_end_each_with_its_own(engine: Engine) -> None:
    async def work(served: AsyncEngine) -> list[list[RequestOutput]]:
        assert served.healthy()
        return list(await asyncio.gather(*(outputs(served, f"r{i}", SHORT) for i in range(5))))

    for number, stream in enumerate(run(engine, work)):
        assert {output.request_id for output in stream} == {f"r{number}"}
        assert [output.finish_reason for output in stream] == [None, None, None, "length"]
        assert [output.completion_tokens for output in stream] == [1, 2, 3, 4]
        assert stream[0].prompt_tokens == 40


@pytest.mark.parametrize("state", ["queue", "prefill", "decode"])
def test_a_reader_that_leaves_gives_everything_back(engine: Engine, state: str) -> None:
    step, permits = engine.step, threading.Semaphore(0)

    def paced() -> Any:
        permits.acquire(timeout=PATIENCE)
        return step()

    async def work(served: AsyncEngine) -> None:
        engine.step = paced  # type: ignore[method-assign]
        others = [
            asyncio.create_task(outputs(served, f"other{i}", LONG))
            for i in range(2 if state == "queue" else 0)
        ]
        permits.release()

        def others_run() -> bool:
            if others:
                permits.release()  # the second may not have come at the first step
            return served.status().running == len(others)

        await until(others_run)
        aborted = served.status().aborted
        stream = served.generate("gone", random_prompt(60, 2), LONG)  # two chunks of 32
        first = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        if state == "decode":
            permits.release(3)
            await first
        else:
            if state == "queue":
                permits.release()
            computed = 0 if state == "queue" else 32
            await until(lambda: "gone" in engine._sequences)
            await until(lambda: engine._sequences["gone"].computed == computed)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
        await stream.aclose()
        permits.release(1000)
        await until(lambda: "gone" not in engine._sequences)
        await until(lambda: served.status().aborted == aborted + 1)
        for task in others:
            assert (await task)[-1].finish_reason == "length"
        await until(lambda: served.status().pages_kv == 0)

    run(engine, work)


def test_refusals_come_through_the_stream_and_harm_nobody(engine: Engine) -> None:
    async def work(served: AsyncEngine) -> None:
        neighbour = asyncio.create_task(outputs(served, "neighbour", SHORT))
        for prompt, message in (([], "is empty"), ([999], "outside"), ([5] * 999, "context")):
            with pytest.raises(RequestError, match=message):
                await anext(served.generate("bad", prompt, SHORT))
        with pytest.raises(TypeError):  # nothing that a prompt can be stops the engine
            await anext(served.generate("bad", [None], SHORT))  # type: ignore[list-item]
        assert len(await neighbour) == 4

    run(engine, work)


def test_an_id_in_use_is_refused_and_its_owner_served_on(engine: Engine) -> None:
    async def work(served: AsyncEngine) -> list[RequestOutput]:
        owner = asyncio.create_task(outputs(served, "same", LONG))
        await until(lambda: "same" in engine._sequences)
        with pytest.raises(ValueError, match="request id is in use: same"):
            await outputs(served, "same", SHORT)
        return await owner

    assert len(run(engine, work)) == 150


def test_shutdown_lets_requests_finish_and_takes_no_more(engine: Engine) -> None:
    async def whole() -> None:
        served = AsyncEngine(engine)
        served.start()
        tasks = [asyncio.create_task(outputs(served, f"r{i}", LONG)) for i in range(3)]
        await asyncio.sleep(0)  # they have sent their requests, the thread may not have seen them
        ending = asyncio.create_task(served.shutdown(PATIENCE))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="takes no more requests") as refused:
            await outputs(served, "late", SHORT)
        assert refused.value.status == 503
        for task in tasks:
            assert (await task)[-1].finish_reason == "length"
        await ending

    asyncio.run(whole())


def test_what_does_not_finish_in_time_ends_with_an_error(engine: Engine) -> None:
    async def whole() -> None:
        served = AsyncEngine(engine)
        served.start()
        tasks = [asyncio.create_task(outputs(served, f"r{i}", LONG)) for i in range(3)]
        await until(lambda: len(engine._sequences) == 3)
        await served.shutdown(0)
        for task in tasks:
            last = (await task)[-1]
            assert last.finish_reason == "error"
            assert last.error == "the engine stopped"

    asyncio.run(whole())


def test_a_step_that_fails_ends_what_ran_and_no_more(engine: Engine) -> None:
    step, broken = engine.step, threading.Event()

    def once() -> Any:
        if broken.is_set():
            return step()
        broken.set()
        raise RuntimeError("a fault made by the test")

    async def work(served: AsyncEngine) -> None:
        tasks = [asyncio.create_task(outputs(served, f"r{i}", LONG)) for i in range(3)]
        await until(lambda: served.status().running == 2)
        engine.step = once  # type: ignore[method-assign]
        ends = [(await task)[-1] for task in tasks]
        assert [(out.finish_reason, out.error_code) for out in ends] == [
            ("error", "engine_failed"),
            ("error", "engine_failed"),
            ("length", None),
        ]
        assert served.healthy()

    run(engine, work)


def test_a_request_waits_no_longer_than_it_may(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, step, going = [0.0], engine.step, threading.Event()

    def steps_or_rests() -> Any:
        return step() if going.wait(0.001) else []

    async def work(served: AsyncEngine) -> None:
        engine.step = steps_or_rests  # type: ignore[method-assign]
        tasks = [asyncio.create_task(outputs(served, f"r{i}", LONG)) for i in range(2)]
        await until(lambda: len(engine._sequences) == 2)
        going.set()
        await until(lambda: served.status().running == 2)
        going.clear()
        late = asyncio.create_task(outputs(served, "late", SHORT))
        await until(lambda: "late" in engine._sequences)
        now[0] = 5.0
        last = (await late)[-1]
        assert (last.finish_reason, last.error_code) == ("error", "timeout")
        assert "waited for 5 s" in (last.error or "")
        going.set()
        for task in tasks:
            assert (await task)[-1].finish_reason == "length"  # longer than that, but they ran

    monkeypatch.setattr(turns, "time", SimpleNamespace(monotonic=lambda: now[0]))
    run(engine, work, queue_timeout=5.0)


def test_questions_are_answered_between_steps(engine: Engine) -> None:
    async def work(served: AsyncEngine) -> None:
        task = asyncio.create_task(outputs(served, "r", LONG))
        found = await served.precision_map()
        geometry = served.info.geometry
        assert [layer["layer"] for layer in found["layers"]] == list(geometry.layers)
        assert {bits for layer in found["layers"] for bits in layer["down"]} == {3}
        with pytest.raises(RequestError, match="started with the policy static:3"):
            await served.set_policy("adaptive")
        assert len(await task) == 150

    async def after() -> None:
        served = AsyncEngine(engine)
        served.start()
        await served.shutdown(0)
        with pytest.raises(RequestError, match="takes no more"):
            await served.precision_map()

    run(engine, work)
    asyncio.run(after())


def test_a_fault_ends_all_streams_and_refuses_new_ones(engine: Engine) -> None:
    async def work(served: AsyncEngine) -> None:
        tasks = [asyncio.create_task(outputs(served, f"r{i}", LONG)) for i in range(3)]
        await until(lambda: served.status().running == 2)

        def broken() -> Any:
            raise EngineLostError("a fault made by the test")

        engine.step = broken  # type: ignore[method-assign]
        for task in tasks:
            last = (await task)[-1]
            assert (last.finish_reason, last.error) == ("error", "the engine failed")
        assert not served.healthy()
        with pytest.raises(RequestError) as refused:
            await outputs(served, "late", SHORT)
        assert refused.value.code == "engine_unavailable"
        served.abort("r0")  # nothing happens

    run(engine, work)


def test_requests_that_come_while_the_engine_dies_end_too(engine: Engine) -> None:
    """However thread and event loop interleave, no stream is left without an end."""
    dying, go = threading.Event(), threading.Event()

    def dies() -> Any:
        dying.set()
        go.wait(PATIENCE)
        raise EngineLostError("a fault made by the test")

    async def work(served: AsyncEngine) -> None:
        engine.step = dies  # type: ignore[method-assign]
        first = asyncio.create_task(outputs(served, "first", SHORT))
        await until(dying.is_set)
        second = asyncio.create_task(outputs(served, "second", SHORT))
        await asyncio.sleep(0)
        go.set()
        for task in (first, second):
            assert (await task)[-1].error == "the engine failed"
        assert "second" not in engine._sequences

    run(engine, work)


def test_health_is_a_turn_of_the_loop_lately_busy_or_idle(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck, go = threading.Event(), threading.Event()
    step = engine.step

    def hangs() -> Any:
        stuck.set()
        go.wait(PATIENCE)
        return step()

    async def work(served: AsyncEngine) -> None:
        def turns_since(moment: float) -> bool:
            return served._last_turn >= moment

        now[0] = 100.0
        await until(lambda: turns_since(100.0))
        now[0] = 104.0
        assert served.healthy()  # idle for less than a stall lasts
        await until(lambda: turns_since(104.0))
        engine.step = hangs  # type: ignore[method-assign]
        task = asyncio.create_task(outputs(served, "r", SHORT))
        await until(stuck.is_set)
        assert served.healthy()
        assert served.status().waiting == 1  # a snapshot does not wait for the step
        now[0] = 108.9
        assert served.healthy()
        now[0] = 109.0
        assert not served.healthy()
        go.set()
        await task
        assert served.healthy()

    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(async_engine, "time", clock)
    run(engine, work, stall_seconds=5.0)


def test_an_event_loop_that_is_gone_does_not_keep_its_request(engine: Engine) -> None:
    served = AsyncEngine(engine)
    served.start()
    loop = asyncio.new_event_loop()
    stream = served.generate("orphan", random_prompt(10, 1), LONG)
    loop.run_until_complete(anext(stream))
    loop.close()
    asyncio.run(until(lambda: not engine.has_work()))
    assert served.healthy()
    asyncio.run(served.shutdown(0))
