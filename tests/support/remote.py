"""Engines in processes of their own, for tests: `StepEngine` by the real worker's loop and wire."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from pw.config import EngineConfig
from pw.engine.process.wire import Load
from pw.engine.request import RequestOutput, SamplingParams
from pw.logs import LogSettings
from pw.serving.process.engine_process import EngineProcess
from pw.serving.process.remote import RemoteEngine
from support.patience import PATIENCE

SCRIPT = Path(__file__).parents[1] / "serving" / "step_worker.py"
FOREVER = SamplingParams()
SHORT = SamplingParams(max_tokens=4)


def launch(mode: str = "0.002", queue_timeout: float | None = None) -> EngineProcess:
    """A process of `step_worker.py`; `mode` is the length of a step in seconds, or "die"."""
    settings = LogSettings(logging.DEBUG, "text")
    load = Load(Path("none"), EngineConfig(), settings, queue_timeout)
    return EngineProcess.launch(load, (str(SCRIPT), mode))


def with_engine(
    work: Callable[[RemoteEngine], Awaitable[Any]], *mode: Any, stall_timeout: float = 60.0
) -> Any:
    """Do something with a started RemoteEngine; its process is gone afterwards."""

    async def whole() -> Any:
        process = launch(*mode)
        ready = await asyncio.to_thread(process.wait_until_ready)
        engine = RemoteEngine(process, ready, stall_timeout=stall_timeout)
        engine.start()
        try:
            return await asyncio.wait_for(work(engine), 1.5 * PATIENCE)
        finally:
            if alive(engine.pid):
                os.kill(engine.pid, signal.SIGCONT)
            await engine.shutdown(0)
            assert not alive(engine.pid)
            assert not engine.healthy()

    return asyncio.run(whole())


async def outputs(
    engine: RemoteEngine, name: str, params: SamplingParams = SHORT, prompt: tuple[int, ...] = (1,)
) -> list[RequestOutput]:
    return [output async for output in engine.generate(name, list(prompt), params)]


async def until(true: Callable[[], bool], seconds: float = PATIENCE) -> float:
    """Wait for something; how long it took in seconds."""
    begin = time.monotonic()
    while not true():
        if time.monotonic() - begin > seconds:
            pytest.fail("waited for too long")
        await asyncio.sleep(0.005)
    return time.monotonic() - begin


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
