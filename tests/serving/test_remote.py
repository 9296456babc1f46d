"""The engine in another process: who waits always gets an end, whatever happens to either."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pw.engine.process.wire import Load
from pw.engine.request import SamplingParams
from pw.errors import PwError, RequestError, StoreError
from pw.logs import LogSettings
from pw.serving.errors import GenerationError
from pw.serving.process import remote
from pw.serving.process.engine_process import EngineProcess
from support.patience import PATIENCE, allowed
from support.remote import FOREVER, SHORT, alive, launch, outputs, until, with_engine
from support.step_engine import StepEngine

ROOT = Path(__file__).parents[2]


def test_streams_end_each_with_its_own_and_are_counted_at_once():
    async def work(engine):
        assert engine.healthy()
        assert engine.info.geometry.experts == 4
        streams = await asyncio.gather(*(outputs(engine, f"r{i}") for i in range(5)))
        assert engine.status().finished == 5  # came with the last outputs
        assert engine.status().layer_bits == {0: 4.0, 1: 4.5}
        assert engine.status().plan_history == ({"reason": "kv_pressure", "moves": 3},)
        return streams

    for number, stream in enumerate(with_engine(work)):
        assert {output.request_id for output in stream} == {f"r{number}"}
        assert "".join(output.text for output in stream) == "1 2 3 4 "
        assert [output.finish_reason for output in stream] == [None, None, None, "length"]


def test_refusals_come_through_the_stream_and_harm_nobody():
    async def work(engine):
        neighbour = asyncio.create_task(outputs(engine, "neighbour", SamplingParams(max_tokens=50)))
        with pytest.raises(RequestError, match="needs 9 pages of 8") as refused:
            await outputs(engine, "bad", prompt=(StepEngine.REFUSE,))
        assert (refused.value.code, refused.value.param, refused.value.status) == (
            "context_length_exceeded",
            "prompt",
            400,
        )
        with pytest.raises(GenerationError, match="could not take") as failed:
            await outputs(engine, "bad", prompt=(StepEngine.CRASH,))
        assert "secret" not in str(failed.value)
        for params in (SamplingParams(min_tokens=10**30), SamplingParams(stop=("\ud800",))):
            with pytest.raises(RequestError, match="cannot be passed on") as refused:
                await outputs(engine, "bad", params)
            assert refused.value.status == 400
        with pytest.raises(ValueError, match="in use: neighbour"):
            await outputs(engine, "neighbour")
        assert len(await neighbour) == 50

    with_engine(work)


def test_policy_and_precision_map_cross():
    async def work(engine):
        assert (await engine.precision_map())["layers"][0]["gate_up"] == [4, 4, 3, 2]
        await engine.set_policy("static:4")
        await until(lambda: engine.status().policy == "static:4")
        with pytest.raises(RequestError, match="2 to 8") as refused:
            await engine.set_policy("static:9")
        assert refused.value.param == "policy"
        with pytest.raises(RequestError, match=r"^internal error$") as refused:
            await engine.set_policy("static:0")
        assert refused.value.status == 500
        assert engine.status().policy == "static:4"

    with_engine(work)


def test_a_reader_that_leaves_ends_its_request():
    async def work(engine):
        stream = engine.generate("gone", [1], FOREVER)
        await anext(stream)
        await stream.aclose()
        await until(lambda: engine.status().aborted == 1)
        other = asyncio.create_task(outputs(engine, "told", FOREVER))
        await until(lambda: engine.status().running == 1)
        engine.abort("told")
        engine.abort("unknown")
        assert (await other)[-1].finish_reason == "abort"
        assert engine.status().running == 0

    with_engine(work)


def test_a_reader_that_falls_behind_is_given_up(monkeypatch):
    monkeypatch.setattr(remote, "MAX_OUTPUTS_BEHIND", 20)

    async def work(engine):
        stream = engine.generate("slow", [1], FOREVER)
        await anext(stream)
        await until(lambda: engine.status().aborted == 1)
        rest = [output async for output in stream]
        assert len(rest) == 21
        assert (rest[-1].finish_reason, rest[-1].error_code) == ("error", "slow_reader")

    with_engine(work)


def test_a_killed_engine_ends_its_streams_at_once():
    async def work(engine):
        stream = asyncio.create_task(outputs(engine, "r", FOREVER))
        hung = asyncio.create_task(engine.precision_map())
        await hung
        await until(lambda: engine.status().running == 1)
        os.kill(engine.pid, signal.SIGKILL)
        begin = time.monotonic()
        last = (await stream)[-1]
        assert time.monotonic() - begin < allowed(2)
        assert (last.finish_reason, last.error_code) == ("error", "engine_failed")
        assert engine.failed
        assert not engine.healthy()
        for attempt in (outputs(engine, "late"), engine.precision_map()):
            with pytest.raises(RequestError, match="the engine failed") as refused:
                await attempt
            assert (refused.value.code, refused.value.status) == ("engine_unavailable", 503)
        assert engine.status().running == 1  # the last word
        engine.abort("r")  # nothing happens

    with_engine(work)


def test_a_stalled_engine_is_seen_and_may_come_back():
    async def work(engine):
        stream = asyncio.create_task(outputs(engine, "r", FOREVER))
        await until(lambda: engine.status().running == 1)
        await asyncio.sleep(2.2)
        assert engine.healthy()
        os.kill(engine.pid, signal.SIGSTOP)
        question = asyncio.create_task(engine.precision_map())
        seconds = await until(lambda: not engine.healthy())
        assert seconds < allowed(3.5)
        last = (await stream)[-1]
        assert (last.finish_reason, last.error_code) == ("error", "engine_stalled")
        with pytest.raises(RequestError, match="stalled"):
            await question
        assert not engine.failed
        with pytest.raises(RequestError, match="the engine is stalled"):
            await outputs(engine, "late")
        os.kill(engine.pid, signal.SIGCONT)
        assert await until(engine.healthy) < allowed(2)
        assert len(await outputs(engine, "again")) == 4
        await until(lambda: engine.status().running == 0)
        assert engine.status().aborted == 1  # the stream that was ended here

    with_engine(work, stall_timeout=2.0)


def test_an_event_loop_that_was_held_up_does_not_blame_the_engine():
    async def work(engine):
        stream = asyncio.create_task(outputs(engine, "r", SamplingParams(max_tokens=400)))
        await until(lambda: engine.status().running == 1)
        time.sleep(3.0)
        await asyncio.sleep(0.3)
        assert engine.healthy()
        assert (await stream)[-1].finish_reason == "length"

    with_engine(work, stall_timeout=2.0)


def test_a_step_that_fails_costs_its_sequences_only():
    async def work(engine):
        broken = await outputs(engine, "r", prompt=(StepEngine.BREAK_ONCE,))
        assert (broken[-1].error, broken[-1].error_code) == (
            "the engine failed at a step",
            "engine_failed",
        )
        assert len(await outputs(engine, "next")) == 4
        for number in range(5):  # not in a row
            await outputs(engine, f"r{number}", prompt=(StepEngine.BREAK_ONCE,))
            await outputs(engine, f"s{number}")
        assert engine.healthy()
        assert engine.status().failed == 6

    with_engine(work)


@pytest.mark.parametrize("fault", [StepEngine.BREAK, StepEngine.LOSE])
def test_a_fault_that_stays_ends_the_engine(fault):
    async def work(engine):
        for number in range(3):
            last = (await outputs(engine, f"r{number}", prompt=(fault,)))[-1]
            assert last.error_code == "engine_failed"
            if fault == StepEngine.LOSE:
                break
            await asyncio.sleep(0.3)  # idle turns in between do not make it well
        await until(lambda: engine.failed)
        assert not engine.healthy()

    with_engine(work)


def test_a_process_whose_device_is_lost_tells_the_reason_and_ends_with_code_1():
    """Nothing on the device is let go of: that would be a SIGABRT."""

    async def work(engine):
        last = (await outputs(engine, "a", prompt=(StepEngine.LOSE_DEVICE,)))[-1]
        assert (last.finish_reason, last.error_code) == ("error", "engine_failed")
        assert engine.failure.startswith("EngineLostError: no device any more")
        await until(lambda: not alive(engine.pid))
        assert engine._process.end(1.0) == "exit code 1"

    with_engine(work)


def test_a_request_that_waits_too_long_is_given_up():
    async def work(engine):
        busy = [asyncio.create_task(outputs(engine, f"r{i}", FOREVER)) for i in range(64)]
        await until(lambda: engine.status().running == 64)
        begin = time.monotonic()
        last = (await outputs(engine, "late"))[-1]
        assert 0.9 < time.monotonic() - begin < allowed(3)
        assert (last.finish_reason, last.error_code) == ("error", "timeout")
        assert "waited for 1 s" in last.error
        assert not any(task.done() for task in busy)  # they have begun
        for number in range(64):
            engine.abort(f"r{number}")
        await asyncio.gather(*busy)

    with_engine(work, "0.002", 1.0)


def test_shutdown_lets_requests_finish_and_takes_no_more():
    async def work(engine):
        params = SamplingParams(max_tokens=300)
        streams = [engine.generate(f"r{i}", [1], params) for i in range(3)]
        for stream in streams:
            assert (await anext(stream)).finish_reason is None
        ending = asyncio.create_task(engine.shutdown(PATIENCE))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="takes no more requests"):
            await outputs(engine, "late")
        for stream in streams:
            assert [output.finish_reason async for output in stream][-1] == "length"
        await ending
        assert not engine.failed

    with_engine(work)


def test_what_does_not_finish_in_time_ends_with_an_error():
    async def work(engine):
        stream = asyncio.create_task(outputs(engine, "r", FOREVER))
        await until(lambda: engine.status().running == 1)
        begin = time.monotonic()
        await engine.shutdown(0)
        assert time.monotonic() - begin < allowed(1.5)
        assert (await stream)[-1].error_code == "engine_stopped"

    with_engine(work)


@pytest.mark.parametrize("how", ["step that hangs", "stopped process"])
def test_shutdown_does_not_wait_for_an_engine_that_hangs(how):
    async def work(engine):
        if how == "stopped process":
            os.kill(engine.pid, signal.SIGSTOP)
        else:
            hung = asyncio.create_task(outputs(engine, "r", prompt=(StepEngine.HANG,)))
            await asyncio.sleep(0.1)
        begin = time.monotonic()
        await engine.shutdown(0)
        assert time.monotonic() - begin < allowed(1.5)
        assert not alive(engine.pid)
        if how == "step that hangs":
            assert (await hung)[-1].error_code == "engine_stopped"

    with_engine(work)


def test_signals_for_the_whole_service_do_not_reach_the_engine():
    async def work(engine):
        assert os.getsid(engine.pid) == engine.pid != os.getsid(0)
        os.kill(engine.pid, signal.SIGINT)
        os.kill(engine.pid, signal.SIGTERM)
        assert len(await outputs(engine, "r", SHORT)) == 4
        assert engine.healthy()

    with_engine(work)


PARENT = """
import time
from support.patience import PATIENCE, allowed
from support.remote import launch
process = launch("0.002")
process.wait_until_ready()
print(process.pid, flush=True)
{then}
"""


@pytest.mark.parametrize("busy", [False, True])
def test_an_engine_whose_server_is_killed_does_not_live_on(busy):
    hang = (
        "from pw.engine.process import wire\n"
        "from pw.engine.request import SamplingParams\n"
        f"add = wire.Add('r', [{StepEngine.HANG}], SamplingParams())\n"
        "process.socket.sendall(wire.frame(add))\n"
    )
    then = (hang if busy else "") + "print('on', flush=True)\ntime.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", PARENT.format(then=then)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as parent:
        pid = int(parent.stdout.readline())
        assert parent.stdout.readline() == "on\n"
        time.sleep(0.2)
        assert alive(pid)
        parent.kill()
    seconds = asyncio.run(until(lambda: not alive(pid)))
    assert seconds < allowed(5 if busy else 2)


def test_an_engine_that_dies_while_it_loads_is_told_in_one_line():
    with pytest.raises(PwError, match="ended while it loaded: SIGKILL") as caught:
        launch("die").wait_until_ready()
    assert "out of memory" in caught.value.hint


def test_errors_of_the_engines_start_are_raised_here(tmp_path):
    """The real worker, with an artifact that is none."""
    from pw.config import EngineConfig

    (tmp_path / "manifest.json").write_text("{}")
    load = Load(tmp_path, EngineConfig(), LogSettings())
    with EngineProcess.launch(load) as process:
        with pytest.raises(StoreError) as caught:
            process.wait_until_ready()
        assert caught.value.exit_code == 3
        assert not alive(process.pid)
