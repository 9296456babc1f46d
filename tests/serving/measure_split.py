"""What the engine's own process costs per token, against an engine in a thread of the server.

    python -m tests.serving.measure_split [ARTIFACT]

Without an artifact the engine is `StepEngine`, whose steps take no time: all that is measured is
the way of a token to its reader. Prints wall and CPU time per step of 1 and 8 streams, the median
of REPEATS runs; the forms take turns, so that both see the same neighbours.
"""

from __future__ import annotations

import asyncio
import logging
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from pw.config import EngineConfig, PrecisionPolicy
from pw.engine import AsyncEngine
from pw.engine.process.wire import Load
from pw.engine.request import SamplingParams
from pw.logs import LogSettings
from pw.serving.process.engine_process import EngineProcess
from pw.serving.process.remote import RemoteEngine
from support.remote import launch
from support.step_engine import StepEngine

REPEATS, TOKENS = 7, 300
PARAMS = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)


def cpu_seconds(pid: int) -> float:
    """Of a process's living threads, to the nanosecond."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


async def one_run(engine: Any, streams: int, name: str) -> None:
    async def read(number: int) -> None:
        prompt = list(range(5 + number, 13 + number))
        async for _ in engine.generate(f"{name}-{number}", prompt, PARAMS):
            pass

    await asyncio.gather(*(read(number) for number in range(streams)))


async def measure(thread: AsyncEngine, remote: RemoteEngine) -> None:
    forms: dict[str, tuple[Any, list[int]]] = {
        "thread": (thread, [os.getpid()]),
        "process": (remote, [os.getpid(), remote.pid]),
    }
    for engine, _ in forms.values():
        engine.start()
        await one_run(engine, 8, "warm")
    for streams in (1, 8):
        found: dict[str, list[tuple[float, float]]] = {form: [] for form in forms}
        for repeat in range(REPEATS):
            for form, (engine, pids) in forms.items():
                cpu, begin = sum(map(cpu_seconds, pids)), time.perf_counter()
                await one_run(engine, streams, f"{form}{streams}{repeat}")
                wall = time.perf_counter() - begin
                found[form].append((wall, sum(map(cpu_seconds, pids)) - cpu))
        for form, runs in found.items():
            wall, cpu = (
                statistics.median(column) / TOKENS * 1e6 for column in zip(*runs, strict=True)
            )
            print(f"{streams} streams, {form:<8} {wall:7.0f} us a step, {cpu:7.0f} us of CPU")
    for engine, _ in forms.values():
        await engine.shutdown(0)


def main(arguments: list[str]) -> None:
    """Measure both forms of one engine."""
    if arguments:
        from pw.engine import Engine

        policy = PrecisionPolicy.parse("static:4")
        config = EngineConfig(memory_budget=64 << 20, policy=policy, max_num_seqs=8)
        path = Path(arguments[0]).resolve()
        process = EngineProcess.launch(Load(path, config, LogSettings(logging.WARNING)))
        thread: Any = AsyncEngine(Engine.from_artifact(path, config))
    else:
        process = launch("0.0")
        thread = AsyncEngine(StepEngine(max_running=8))  # type: ignore[arg-type]
    with process:
        remote = RemoteEngine(process, process.wait_until_ready())
        asyncio.run(measure(thread, remote))


if __name__ == "__main__":
    main(sys.argv[1:])
