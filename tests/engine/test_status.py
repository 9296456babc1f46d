"""What a snapshot counts: steps by their tokens, raises that landed, experts nobody asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pw.engine.request import SamplingParams
from pw.engine.status import Counters
from support.engines import open_engine, random_prompt, tight_budget

GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


def test_steps_are_counted_under_the_next_power_of_two() -> None:
    counters = Counters()
    for tokens in (1, 2, 3, 4, 5, 8, 9):
        counters.count_step(tokens)
    assert counters.steps_by_tokens == {1: 1, 2: 1, 4: 2, 8: 2, 16: 1}
    assert counters.step_tokens == 32


def test_steps_of_a_request(qwen: tuple[Any, Path]) -> None:
    engine = open_engine(qwen[1], max_num_batched_tokens=32)
    engine.generate([random_prompt(40, 0)], GREEDY)
    status = engine.status()
    assert status.steps_by_tokens == {32: 1, 8: 1, 1: 2}  # 32 and 8 of the prompt, then two more
    assert status.step_tokens == 42
    assert status.step == 4


def test_experts_that_no_token_was_routed_to(qwen: tuple[Any, Path]) -> None:
    engine = open_engine(qwen[1])
    experts = engine._parts.table.geometry.blocks // 2
    assert engine.status().experts_never_routed == experts
    engine.generate([[5]], SamplingParams(temperature=0, max_tokens=0))
    geometry = engine._parts.table.geometry
    routed = (engine._parts.quality._routing._sums > 0).sum()
    assert 0 < routed < experts
    assert engine.status().experts_never_routed == experts - routed
    assert len(geometry.layers) * geometry.experts == experts
    assert open_engine(qwen[1], "static:4").status().experts_never_routed is None


def test_concurrency_is_pages_beside_the_experts_by_pages_of_the_longest_request(
    qwen: tuple[Any, Path],
) -> None:
    engine = open_engine(qwen[1], max_model_len=100)
    longest, pages = engine.pages_for_tokens(100), engine.status().pages_total
    found = engine.info().concurrency
    assert list(found) == ["6 bits", "2 bits"]
    assert engine.status().mean_bits == 6
    assert found["6 bits"] == (pages - engine.status().pages_weights) / longest
    for policy, name in (("static:2", "2 bits"), ("dense", "unquantized")):
        fixed = open_engine(qwen[1], policy, max_model_len=100)
        status = fixed.status()
        beside = status.pages_total - status.pages_weights
        assert fixed.info().concurrency == {name: beside / longest}
        if policy == "static:2":
            assert found["2 bits"] == (pages - status.pages_weights) / longest


def test_raises_that_landed(qwen: tuple[Any, Path]) -> None:
    budget = tight_budget(qwen[1], kv_tokens=80)
    engine = open_engine(qwen[1], memory_budget=budget, planner_low_watermark=0.01)
    for number in range(5):
        engine.add_request(f"r{number}", random_prompt(150, number), GREEDY)
    while engine.has_work():
        engine.step()
    before = engine.status()
    for _ in range(100):
        engine.idle_turn()
    after = engine.status()
    assert after.mean_bits == 6 > before.mean_bits
    assert after.moves - before.moves == after.transitions - before.transitions > 0
    assert after.move_seconds_total > before.move_seconds_total
    assert sum(after.plans_by_trigger.values()) == after.plans
    assert {"idle", "kv_pressure"} <= set(after.plans_by_trigger)
    assert 0 < before.plan_seconds_total < after.plan_seconds_total
    assert after.plans > before.plans > 0
    assert after.plan_runs > before.plan_runs > 0
