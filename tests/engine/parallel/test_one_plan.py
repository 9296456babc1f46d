"""One plan for all ranks: the same bits at the same step, whoever is late or fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from pw.engine import Engine, runner
from pw.engine.context import StepBatch
from pw.engine.graphs import prompts, start
from pw.engine.graphs.capture import eager
from pw.engine.graphs.decode import DecodeSteps
from pw.engine.request import SamplingParams
from pw.engine.sequence import Chunk
from pw.errors import EngineLostError
from support.engines import make_artifact, open_engine, random_prompt
from support.patience import PATIENCE, patiently
from support.ranks import FollowerThread, threads

__all__ = ["threads"]

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
TWO: dict[str, Any] = {
    "tensor_parallel_size": 2, "collective_timeout": 240.0, "planner_low_watermark": 0.01,
}  # fmt: skip


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_artifact("qwen2_moe", tmp_path_factory.mktemp("shared"))[1]


def squeezed(artifact: Path, threads: list[FollowerThread], **settings: Any) -> tuple[Engine, Any]:
    """An engine of two ranks under pressure, and what its follower has."""
    roomy = open_engine(artifact, **(TWO | settings))
    status = roomy.status()
    pages = roomy._parts.kv.pages_for_tokens(80)
    roomy.close()
    fixed = status.bytes.total - status.bytes.free
    budget = fixed + pages * status.page_bytes
    engine = open_engine(artifact, memory_budget=budget, **(TWO | settings))
    return engine, threads[-1].followed


def record(engine: Engine, followed: Any) -> tuple[list[bytes], list[bytes]]:
    """Committed bits of both ranks at each step from here on."""
    leads: list[bytes] = []
    follows: list[bytes] = []
    runner, compute = engine._parts.runner, followed.compute
    run: Callable[..., Any] = runner.run
    run_ahead: Callable[..., Any] = runner.run_ahead

    def lead(chunks: list[Chunk]) -> Any:
        assert engine._parts.table is not None
        leads.append(engine._parts.table.committed.tobytes())
        return run(chunks)

    def follow(step: Any) -> None:
        follows.append(followed._table.committed.tobytes())
        compute(step)

    def lead_ahead(chunks: list[Chunk], drawn: Any) -> Any:
        assert engine._parts.table is not None
        leads.append(engine._parts.table.committed.tobytes())
        return run_ahead(chunks, drawn)

    runner.run = lead  # type: ignore[method-assign]
    runner.run_ahead = lead_ahead  # type: ignore[method-assign]
    followed.compute = follow
    return leads, follows


def steps(engine: Engine, seeds: range, length: int = 150) -> Iterator[float]:
    """Run prompts to their ends; mean bits after each step."""
    for seed in seeds:
        engine.add_request(f"r{seed}", random_prompt(length, seed), GREEDY)
    while engine.has_work():
        for output in engine.step():
            assert output.error is None, output.error
        engine.check_integrity()
        yield engine.status().mean_bits


def settle(engine: Engine, bits: float = 6.0) -> None:
    for _ in patiently(0):
        if engine.status().mean_bits == bits:
            return
        engine.idle_turn()
        engine.check_integrity()


def check_alike(engine: Engine, followed: Any) -> None:
    """Both page tables are the same, once the follower has made its last turn."""
    table = engine._parts.table
    assert table is not None
    engine.check_integrity()
    assert torch.equal(followed._table._mirror.host, table._mirror.host)


@pytest.fixture
def uncaptured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let decode steps of fixed shape run as they are, without a GPU."""

    def make(*arguments: Any) -> DecodeSteps:
        return DecodeSteps(*arguments, eager)

    monkeypatch.setattr(runner, "capture_steps", make)


@pytest.mark.parametrize("by_expert", [False, True], ids=["slices", "experts"])
@pytest.mark.usefixtures("uncaptured")
def test_ranks_commit_the_same_bits_at_the_same_steps(
    artifact: Path, threads: list[FollowerThread], by_expert: bool
) -> None:
    settings = {"enable_expert_parallel": by_expert, "async_scheduling": True}
    engine, followed = squeezed(artifact, threads, **settings)
    if by_expert:  # and in fixed shapes, that overlap
        engine._parts.runner.capture(8)
    settle(engine)
    leads, follows = record(engine, followed)
    lowest = min(steps(engine, range(4)))
    settle(engine)
    assert list(steps(engine, range(4, 5), 20))
    assert 2 <= lowest < 6
    assert leads == follows
    assert len(set(leads)) > 3
    check_alike(engine, followed)
    engine.close()


def test_a_rehearsed_prompt_that_breaks_on_one_rank_keeps_no_other_waiting(
    artifact: Path, threads: list[FollowerThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    attend, broken = StepBatch.attend, []

    def breaks(batch: StepBatch, layer: int, *rest: Any, **options: Any) -> torch.Tensor:
        if layer and threading.current_thread() is not threading.main_thread():
            broken.append(layer)  # behind the sums of the first layer
            raise RuntimeError("out of memory")
        return attend(batch, layer, *rest, **options)

    def make(*arguments: Any) -> DecodeSteps | None:
        return start.capture_steps(*arguments, lambda _: eager)

    monkeypatch.setattr(runner, "capture_steps", make)
    monkeypatch.setattr(prompts._NobodysPrompt, "attend", breaks)
    settings: dict[str, Any] = TWO | {"collective_timeout": 20.0}
    engine = open_engine(artifact, "static:4", **settings)
    asked = [random_prompt(20, seed) for seed in range(3)]
    expected = engine.generate(asked, GREEDY)
    engine._parts.runner.capture(8)
    assert broken
    assert engine._parts.runner.steps is not None
    found = engine.generate(asked, GREEDY)
    assert [its.token_ids for its in found] == [its.token_ids for its in expected]
    assert threads[-1].followed._runner.steps is not None
    engine.close()


def test_a_rank_that_is_late_holds_the_commit_back_and_no_step(
    artifact: Path, threads: list[FollowerThread]
) -> None:
    engine, followed = squeezed(artifact, threads)
    settle(engine)
    assert min(steps(engine, range(3))) < 6
    poll, late = followed._mover.poll, threading.Event()
    late.set()
    followed._mover.poll = lambda: [] if late.is_set() else poll()
    table = engine._parts.table
    assert table is not None
    for _ in patiently():
        engine.idle_turn()
        if table.in_transfer:
            break
    bits = table.committed.copy()
    for _ in range(200):
        engine.idle_turn()
        assert table.in_transfer
        assert np.array_equal(table.committed, bits)
    assert engine._parts.mover is not None
    assert engine._parts.mover.pending > 0
    list(steps(engine, range(3, 4), 10))  # requests are served meanwhile
    late.clear()
    settle(engine)
    check_alike(engine, followed)
    engine.close()


def test_a_copy_that_fails_on_one_rank_fails_on_all(
    artifact: Path, threads: list[FollowerThread]
) -> None:
    engine, followed = squeezed(artifact, threads, offload_cpu_memory=0)
    settle(engine)
    source, broken = followed._store._source, threading.Event()

    class BadDisk:
        """The follower's source of planes; reads fail while it is broken."""

        geometry = source.geometry

        def read_planes(self, *arguments: Any) -> None:
            if broken.is_set():
                raise OSError(5, "Input/output error")
            source.read_planes(*arguments)

        def read_lut(self, *arguments: Any) -> None:
            if broken.is_set():
                raise OSError(5, "Input/output error")
            source.read_lut(*arguments)

    followed._store._source = BadDisk()
    broken.set()
    list(steps(engine, range(4)))
    for _ in patiently():
        engine.idle_turn()
        if engine.status().transfer_failures > 0:
            break
    assert engine.status().failed == 0
    check_alike_tables(engine, followed)
    broken.clear()
    settle(engine)
    check_alike(engine, followed)
    engine.close()


def check_alike_tables(engine: Engine, followed: Any) -> None:
    """Committed bits agree while reads of the follower fail."""
    assert engine._parts.table is not None
    for _ in patiently():
        engine.idle_turn()
        if np.array_equal(followed._table.committed, engine._parts.table.committed):
            return


@pytest.mark.usefixtures("uncaptured")
def test_fixed_shapes_for_decoding_are_the_same_on_all_ranks(
    artifact: Path, threads: list[FollowerThread]
) -> None:
    """As with CUDA graphs: padded batches, chosen alike, the next launched before one is read."""
    plain = open_engine(artifact, "static:4")
    prompts = [random_prompt(length, length) for length in (33, 5, 40)]
    expected = [done.token_ids for done in plain.generate(prompts, GREEDY)]
    for by_expert in (False, True):
        settings = TWO | {"enable_expert_parallel": by_expert, "async_scheduling": True}
        engine = open_engine(artifact, "static:4", **settings)
        engine._parts.runner.capture(8)
        assert engine._parts.runner.steps is not None
        followed = threads[-1].followed
        assert followed is not None
        with patch.object(followed._runner, "run_ahead", wraps=followed._runner.run_ahead) as ahead:
            assert [done.token_ids for done in engine.generate(prompts, GREEDY)] == expected
        assert ahead.call_count > 10
        engine.close()
        assert followed._runner.steps is None  # nothing of it is left for the ranks to wait for


def test_a_rank_that_does_not_come_ends_the_replica(
    artifact: Path, threads: list[FollowerThread]
) -> None:
    engine = open_engine(artifact, "static:3", **TWO)
    followed, gate, team = threads[-1].followed, threading.Event(), engine._parts.team
    assert followed is not None
    assert team is not None
    team.group._options.timeout = timedelta(seconds=1)  # once all have loaded, in their time
    followed.compute = lambda step: gate.wait(PATIENCE)  # type: ignore[assignment, method-assign]
    engine.add_request("a", random_prompt(5, 0), GREEDY)
    with pytest.raises(EngineLostError, match="the 2 ranks do not come together"):
        engine.step()
    gate.set()
    engine.close()


def test_a_step_that_breaks_when_ranks_were_given_up_ends_the_replica(
    artifact: Path, threads: list[FollowerThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anywhere in it: what lies on the device then is garbage."""
    engine = open_engine(artifact, "static:3", **TWO)
    team, table = engine._parts.team, engine._parts.table
    assert team is not None
    assert table is not None

    def broken() -> None:
        raise RuntimeError("device-side assert triggered")

    monkeypatch.setattr(table, "publish", broken)
    engine.add_request("a", random_prompt(5, 0), GREEDY)
    with pytest.raises(RuntimeError, match="device-side assert"):
        engine.step()  # of a step, not of the engine
    team._given_up = True
    with pytest.raises(EngineLostError, match="the 2 ranks do not come together: RuntimeError"):
        engine.step()
    engine.close()


def test_a_rank_that_breaks_ends_the_replica_with_its_reason(
    artifact: Path, threads: list[FollowerThread]
) -> None:
    engine = open_engine(artifact, "static:3", **TWO)
    followed, team = threads[-1].followed, engine._parts.team
    assert followed is not None
    assert team is not None

    def broken(changes: Any) -> None:
        raise ValueError("no more luck")

    def idle() -> None:
        for _ in patiently():
            engine.idle_turn()

    followed.change = broken  # type: ignore[method-assign]
    team.turn()
    with pytest.raises(EngineLostError, match="rank 1 of 2 has ended"):
        idle()
    team.followers[0].receive(0)
    assert team.followers[0].lost is not None
    assert "no more luck" in team.followers[0].lost.message
    engine.close()
