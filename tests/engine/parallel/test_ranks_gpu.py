"""Two ranks on two GPUs: the tokens of one, from graphs too, and one plan under pressure."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from pw.engine import Engine
from pw.engine.process.wire import Load
from pw.engine.request import SamplingParams
from pw.evaluation.bench.filling import Ballast
from pw.logs import LogSettings
from pw.serving.process.engine_process import EngineProcess
from pw.serving.process.remote import RemoteEngine
from support.engines import make_artifact, open_engine, random_prompt
from support.one_gpu import WHERE, answers
from support.remote import alive, until
from tests.engine.parallel import test_lost_rank

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
TWO: dict[str, Any] = {"tensor_parallel_size": 2, "collective_timeout": 30.0}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_artifact("qwen2_moe", tmp_path_factory.mktemp("shared"))[1]


@pytest.fixture(scope="module")
def expected(artifact: Path) -> Iterator[Callable[[], list[list[int]]]]:
    """The tokens of one GPU, from a process that starts while the ranks do."""
    command = [sys.executable, "-m", "support.one_gpu", str(artifact)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        out = child.stdout

        @cache
        def tokens() -> list[list[int]]:
            found: list[list[int]] = json.loads(out.read().splitlines()[-1])
            return found

        yield tokens
        child.kill()


@pytest.mark.parametrize("by_expert", [False, True], ids=["slices", "experts"])
def test_two_gpus_give_the_tokens_of_one_and_move_bits_alike(
    artifact: Path, expected: Callable[[], list[list[int]]], by_expert: bool
) -> None:
    """Prompts by calls, decode steps from graphs; under pressure both page tables are the same.

    One engine for both: most of the time goes to its start.
    """
    engine = open_engine(
        artifact, enable_expert_parallel=by_expert, planner_low_watermark=0.01, **(WHERE | TWO)
    )
    try:
        assert engine._parts.runner.steps is not None
        engine.set_policy("static:4")
        settle(engine, 4.0)
        assert answers(engine) == expected()
        engine.set_policy("adaptive")
        settle(engine)
        assert 2 <= squeeze(engine) < 6
    finally:
        engine.close()
    team = engine._parts.team
    assert team is not None
    assert team.followers[0].how_it_ended() is not None


def squeeze(engine: Engine) -> float:
    """Requests that need more room than the widest planes leave, in cycles; the least mean bits."""
    table = engine._parts.table
    assert table is not None
    room = engine._parts.kv.pages_for_tokens(80)
    Ballast(engine).leave(engine._parts.pool.num_pages - engine.status().pages_free + room)
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    lowest = 6.0
    for cycle in range(3):
        for seed in range(3):
            engine.add_request(f"{cycle}.{seed}", random_prompt(150, seed), greedy)
        while engine.has_work():
            assert [output.error for output in engine.step() if output.error] == []
            table.check_integrity()
            lowest = min(lowest, engine.status().mean_bits)
        settle(engine)
    return lowest


def settle(engine: Engine, bits: float = 6.0) -> None:
    """Let all planes come to a width."""
    table = engine._parts.table
    assert table is not None
    end = time.monotonic() + 20
    while engine.status().mean_bits != bits:
        assert time.monotonic() < end, engine.status()
        engine.idle_turn()
    table.check_integrity()


def test_a_killed_rank_ends_the_replica_in_the_middle_of_a_sum(artifact: Path) -> None:
    """Graphs on: the sums that wait for it on the device are ended, and the reason is told."""
    config = replace(test_lost_rank.CONFIG, device="cuda", memory_budget=256 << 20)

    async def whole() -> None:
        load = Load(artifact, config, LogSettings(logging.INFO, "text"))
        process = EngineProcess.launch(load)
        ready = await asyncio.to_thread(process.wait_until_ready)
        (follower,) = test_lost_rank.children(process.pid)
        engine = RemoteEngine(process, ready)
        engine.start()
        try:
            outputs = await test_lost_rank.kill_while_streaming(engine, follower)
            assert outputs[-1].finish_reason == "error"
            assert outputs[-1].error_code == "engine_failed"
            assert engine.failure == "EngineLostError: rank 1 of 2 has ended: SIGKILL"
            await until(lambda: not alive(engine.pid))
            assert process.end(1.0) == "exit code 1"
        finally:
            await engine.shutdown(0)
        assert not alive(follower)

    asyncio.run(whole())
