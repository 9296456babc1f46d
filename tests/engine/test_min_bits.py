"""A request's least width: it is there before the first token, and until the last."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from pw.engine import Engine
from pw.engine.request import RequestOutput, SamplingParams
from pw.errors import RequestError, StoreError
from support.engines import open_engine, random_prompt, tight_budget


def greedy(tokens: int, min_bits: int | None = None) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, min_bits=min_bits)


def squeezed(artifact: Path, kv_tokens: int, bits: int = 2, **settings: Any) -> Engine:
    """An engine with room for so many tokens beside all planes of a width, its planes given up."""
    budget = tight_budget(artifact, kv_tokens, f"static:{bits}")
    settings = {"planner_idle_grace_seconds": 1e9, "planner_high_watermark": 1.0} | settings
    return open_engine(artifact, memory_budget=budget, **settings)


def drain(engine: Engine, floors: dict[str, int] | None = None) -> dict[str, list[RequestOutput]]:
    """Run to the end; no block may ever be below the floor of a request that got a token."""
    outputs: dict[str, list[RequestOutput]] = {}
    steps = 0
    while engine.has_work():
        steps += 1
        assert steps < 5000
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
            if output.token_ids:
                assert output.min_bits >= (floors or {}).get(output.request_id, 0)
        engine.check_integrity()
    return outputs


def test_planes_come_back_before_the_request_starts(qwen: tuple[Any, Path]) -> None:
    engine = squeezed(qwen[1], 60, bits=4)
    engine.generate([random_prompt(90, 1)], greedy(4))
    assert int(engine._parts.table.committed.min()) < 4  # type: ignore[union-attr]
    engine.add_request("floor", random_prompt(20, 2), greedy(10, min_bits=4))
    engine.add_request("other", random_prompt(20, 3), greedy(10))
    outputs = drain(engine, {"floor": 4})
    assert all(its[-1].finish_reason == "length" for its in outputs.values())
    assert engine._parts.precision.floor == 0


def test_only_blocks_that_gave_something_up_for_a_floor_are_counted(
    qwen: tuple[Any, Path],
) -> None:
    engine = squeezed(qwen[1], 60, bits=4)
    precision: Any = engine._parts.precision
    wide = [int(block) for block in (precision._table.committed > 4).nonzero()[0]]
    assert len(wide) > 1
    allowed, before = set(wide[::2]), engine.status()
    precision._layer_gives = lambda move: move.block in allowed
    precision.aim = 4
    precision._give(10**6)
    after = engine.status()
    (record,) = after.plan_history[len(before.plan_history) :]
    changed = (precision._table.committed[wide] == 4).nonzero()[0]
    assert {wide[number] for number in changed} == allowed
    assert record["moves"] == after.transitions - before.transitions == len(allowed)
    freed = after.bytes_released - before.bytes_released
    assert record["pages"] == freed // after.page_bytes > 0
    precision._give(10**6)  # nobody is left who may
    assert engine.status().plans == after.plans
    engine.check_integrity()


def test_the_answer_is_that_of_the_width(qwen: tuple[Any, Path]) -> None:
    prompt = random_prompt(20, 2)
    engine = squeezed(qwen[1], 60, bits=4, max_bits=4)
    engine.generate([random_prompt(90, 1)], greedy(4))
    expected = open_engine(qwen[1], "static:4").generate([prompt], greedy(12))[0]
    assert engine.generate([prompt], greedy(12, min_bits=4))[0].token_ids == expected.token_ids


def test_a_floor_holds_under_pressure_and_everybody_ends(qwen: tuple[Any, Path]) -> None:
    engine = squeezed(qwen[1], 150, bits=4, planner_low_watermark=0.01)
    floors = {}
    for seed in range(10):
        floor = (None, 3, 4)[seed % 3]
        if floor is not None:
            floors[f"r{seed}"] = floor
        engine.add_request(f"r{seed}", random_prompt(30 + seed, seed), greedy(40, floor))
    outputs = drain(engine, floors)
    assert len(outputs) == 10
    assert all(its[-1].completion_tokens == 40 for its in outputs.values())
    assert engine.status().preemptions > 0  # planes were not to be had, so somebody had to wait


def test_a_long_old_request_is_not_held_up_by_a_floor(qwen: tuple[Any, Path]) -> None:
    engine = squeezed(qwen[1], 70, bits=4)
    assert engine.max_model_len > 150
    engine.add_request("old", random_prompt(20, 1), greedy(130))
    for _ in range(3):
        engine.step()
    engine.add_request("floor", random_prompt(20, 2), greedy(30, min_bits=4))
    outputs = drain(engine, {"floor": 4})
    assert outputs["old"][-1].completion_tokens == 130
    assert outputs["floor"][-1].completion_tokens == 30


def test_what_the_budget_cannot_hold_is_refused_with_numbers(qwen: tuple[Any, Path]) -> None:
    engine = squeezed(qwen[1], 60, bits=4)
    with pytest.raises(RequestError, match=r"at 4 bits \(\d+ without min_bits\)") as seen:
        engine.add_request("r", random_prompt(60, 1), greedy(60, min_bits=4))
    assert seen.value.code == "context_length_exceeded"
    with pytest.raises(RequestError, match=r"min_bits 6 needs [\d,]+ bytes for weights") as refused:
        engine.add_request("r", [5], greedy(1, min_bits=6))
    assert refused.value.param == "min_bits"
    with pytest.raises(RequestError, match="min_bits must be at most 6 on this server: 7"):
        engine.add_request("r", [5], greedy(1, min_bits=7))
    assert not engine.has_work()
    limit = int(str(seen.value).split(" tokens")[0].split()[-1])
    at_most = engine.generate([random_prompt(limit - 3, 1)], greedy(3, min_bits=4))[0]
    assert (at_most.finish_reason, len(at_most.token_ids)) == ("length", 3)
    with pytest.raises(RequestError, match="maximum context length"):
        engine.add_request("r", random_prompt(limit - 2, 1), greedy(3, min_bits=4))
    done = engine.generate([random_prompt(20, 1)], greedy(5, min_bits=2))[0]
    assert done.finish_reason == "length"


@pytest.mark.parametrize(("policy", "most"), [("static:3", 3), ("dense", 16)])
def test_fixed_widths_have_what_they_have(qwen: tuple[Any, Path], policy: str, most: int) -> None:
    engine = open_engine(qwen[1], policy)
    engine.add_request("r", [5], greedy(2, min_bits=most))
    assert [output.min_bits for output in engine.step()] == [most]
    if policy != "dense":
        with pytest.raises(RequestError, match="at most 3 on this server: 4"):
            engine.add_request("s", [5], greedy(2, min_bits=4))


def test_planes_that_cannot_be_read_end_the_wait(
    qwen: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = squeezed(qwen[1], 60, bits=4)
    engine.generate([random_prompt(90, 1)], greedy(4))

    def unreadable(*_: Any) -> Any:
        raise StoreError("a fault made by the test")

    monkeypatch.setattr(engine._parts.store, "_places", [])  # all is on disk
    monkeypatch.setattr(engine._parts.store, "read", unreadable)
    engine.add_request("floor", random_prompt(20, 2), greedy(10, min_bits=4))
    engine.add_request("other", random_prompt(20, 3), greedy(10))
    outputs = drain(engine)
    assert outputs["floor"][-1].error_code == "precision_unavailable"
    assert outputs["other"][-1].finish_reason == "length"


def test_a_policy_below_a_running_floor_is_refused(qwen: tuple[Any, Path]) -> None:
    engine = open_engine(qwen[1], memory_budget=tight_budget(qwen[1], 300))
    engine.add_request("floor", random_prompt(20, 2), greedy(10, min_bits=4))
    engine.step()
    with pytest.raises(RequestError, match="was promised 4 bits: 3"):
        engine.set_policy("static:3")
    engine.add_request("late", random_prompt(20, 2), greedy(10, min_bits=5))
    while engine.status().running:
        engine.step()
    engine.set_policy("static:3")
    with pytest.raises(RequestError, match="at most 3 on this server: 5"):
        engine.add_request("later", random_prompt(20, 2), greedy(10, min_bits=5))
    engine.set_policy("adaptive")
    engine.add_request("queued", random_prompt(20, 2), greedy(10, min_bits=5))
    engine.set_policy("static:3")
    outputs = drain(engine)
    assert outputs["queued"][-1].error_code == "precision_unavailable"


def test_a_replay_of_floors_repeats_every_token(qwen: tuple[Any, Path], tmp_path: Path) -> None:
    def run(engine: Engine) -> list[list[int]]:
        for seed in range(9):
            floor = 4 if seed % 4 == 3 else None
            engine.add_request(f"r{seed}", random_prompt(40 + seed, seed), greedy(30, floor))
        outputs = drain(engine)
        engine.close()
        return [
            [t for output in outputs[f"r{seed}"] for t in output.token_ids] for seed in range(9)
        ]

    trace = tmp_path / "trace.jsonl"
    start = functools.partial(squeezed, qwen[1], 150, bits=4, planner_low_watermark=0.01)
    engine = start(trace=trace)
    expected = run(engine)
    events = [json.loads(line) for line in trace.read_text().splitlines()]
    assert any(event.get("reason") == "floor" for event in events)
    budget = engine.status().bytes.budget
    replay = open_engine(qwen[1], f"replay:{trace}", memory_budget=budget)
    assert run(replay) == expected
    assert replay._parts.precision.diverged == 0  # type: ignore[attr-defined]
