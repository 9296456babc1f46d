"""Processes of a replica that are killed: streams end, nobody is left behind."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path
from typing import Any

from pw.config import EngineConfig, PrecisionPolicy
from pw.engine.process.wire import Load
from pw.engine.request import RequestOutput, SamplingParams
from pw.logs import LogSettings
from pw.serving.process.engine_process import EngineProcess
from pw.serving.process.remote import RemoteEngine
from support.engines import random_prompt
from support.remote import alive, until

CONFIG = EngineConfig(
    memory_budget=64 << 20,
    policy=PrecisionPolicy.parse("static:3"),
    device="cpu",
    max_num_seqs=4,
    max_num_batched_tokens=32,
    tensor_parallel_size=2,
    collective_timeout=240.0,  # kernels may be compiled in the first step
)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def kill_while_streaming(engine: RemoteEngine, victim: int) -> list[RequestOutput]:
    """Outputs of a stream during which a process is killed."""
    outputs: list[RequestOutput] = []
    async for output in engine.generate("a", random_prompt(5, 0), LONG):
        if not outputs:
            os.kill(victim, signal.SIGKILL)
        outputs.append(output)
    return outputs


def test_a_killed_rank_ends_the_replica_and_the_streams(qwen: tuple[Any, Path]) -> None:
    async def whole() -> None:
        load = Load(qwen[1], CONFIG, LogSettings(logging.INFO, "text"))
        process = EngineProcess.launch(load)
        ready = await asyncio.to_thread(process.wait_until_ready)
        (follower,) = children(process.pid)
        engine = RemoteEngine(process, ready)
        engine.start()
        try:
            outputs = await kill_while_streaming(engine, follower)
            assert outputs[-1].finish_reason == "error"
            assert outputs[-1].error_code == "engine_failed"
            assert engine.failed
            assert not engine.healthy()
            assert engine.failure == "EngineLostError: rank 1 of 2 has ended: SIGKILL"
            await until(lambda: not alive(engine.pid))
            assert process.end(1.0) == "exit code 1"
        finally:
            await engine.shutdown(0)
        assert not alive(follower)

    asyncio.run(whole())


def test_no_rank_outlives_rank_0(qwen: tuple[Any, Path]) -> None:
    async def whole() -> None:
        load = Load(qwen[1], CONFIG, LogSettings(logging.INFO, "text"))
        with EngineProcess.launch(load) as process:
            await asyncio.to_thread(process.wait_until_ready)
            (follower,) = children(process.pid)
            os.kill(process.pid, signal.SIGKILL)
            await until(lambda: not alive(follower))

    asyncio.run(whole())
