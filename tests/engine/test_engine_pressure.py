"""Memory pressure: planes are given up and come back, requests finish, no page is lost."""

from __future__ import annotations

import json
import math
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pw.engine import Engine
from pw.engine.request import EngineStatus, SamplingParams
from pw.errors import BudgetError, ConfigError, RequestError, StoreError
from pw.planning.pressure import Decision
from support.engines import open_engine, random_prompt, tight_budget

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def run(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> Iterator[EngineStatus]:
    """Step until all are done; integrity and status after every step."""
    for number, prompt in enumerate(prompts):
        engine.add_request(f"r{number}", prompt, params)
    while engine.has_work():
        for output in engine.step():
            assert output.error is None, output.error
        engine.check_integrity()
        status = engine.status()
        assert status.bytes_over_budget == 0
        yield status


def settle(engine: Engine) -> None:
    """Idle until nothing has changed for as long as a dwell may last."""
    quiet = 0
    while quiet < 40:
        quiet = 0 if engine.idle_turn() else quiet + 1
    engine.check_integrity()


def test_planes_are_given_up_for_kv_and_come_back(qwen: tuple[Any, Path]) -> None:
    _, artifact = qwen
    budget = tight_budget(artifact, kv_tokens=80)
    engine = open_engine(artifact, memory_budget=budget, planner_low_watermark=0.01)
    settle(engine)
    assert engine.status().mean_bits == 6
    prompts = [random_prompt(150, seed) for seed in range(7)]
    lowest = min(status.mean_bits for status in run(engine, prompts, GREEDY))
    assert 2 <= lowest < 5
    assert engine.status().finished == 7
    settle(engine)
    assert engine.status().mean_bits == 6
    assert engine.status().pages_kv == 0


def test_hundred_squeeze_cycles_end_bit_exact(qwen: tuple[Any, Path]) -> None:
    _, artifact = qwen
    budget = tight_budget(artifact, kv_tokens=60)
    engine = open_engine(artifact, memory_budget=budget, planner_low_watermark=0.01)
    settle(engine)
    probe = [random_prompt(20, 99)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=0)
    before = engine.generate(probe, params)
    settle(engine)
    free = engine.status().pages_free
    squeeze = SamplingParams(temperature=0, max_tokens=1)
    for cycle in range(100):
        engine.generate([random_prompt(40, cycle * 3 + i) for i in range(3)], squeeze)
        settle(engine)
        assert engine.status().mean_bits == 6
        assert engine.status().pages_free == free
    assert engine.status().transitions > 200
    assert engine.generate(probe, params) == before


def test_sixteen_long_requests_over_a_cache_that_holds_one_and_a_half(
    qwen: tuple[Any, Path],
) -> None:
    _, artifact = qwen
    length, new = 20, 70
    kv_tokens = (length + new) * 3 // 2
    roomy = open_engine(artifact, "static:4")
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    prompts = [random_prompt(length, seed) for seed in range(16)]
    expected = [roomy.generate([prompt], params)[0].token_ids for prompt in prompts]

    budget = tight_budget(artifact, kv_tokens, "static:4")
    engine = open_engine(artifact, "static:4", memory_budget=budget)
    completions = engine.generate(prompts, params)
    assert engine.status().preemptions > 0
    assert [c.finish_reason for c in completions] == ["length"] * 16
    # Preempted equals not preempted (greedy, fixed widths).
    assert [c.token_ids for c in completions] == expected
    engine.check_integrity()


@pytest.mark.parametrize("mover", ["quick", "slow"])
def test_sixteen_long_requests_finish_under_adaptive_precision_too(
    qwen: tuple[Any, Path], mover: str
) -> None:
    _, artifact = qwen
    least = open_engine(artifact, "static:2")
    page = least.status().page_bytes
    needed = least.status().bytes.total - least.status().bytes.free
    engine = open_engine(artifact, memory_budget=needed + page * 3 * 60)
    if mover == "slow":
        engine._parts.mover._chunk_pages = 1  # type: ignore[union-attr]
    prompts = [random_prompt(40, seed) for seed in range(16)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    for _ in run(engine, prompts, params):
        pass
    assert engine.status().finished == 16
    assert engine.status().failed == 0


def test_layer_floors_bound_what_may_be_released(qwen: tuple[Any, Path]) -> None:
    _, artifact = qwen
    budget = tight_budget(artifact, kv_tokens=80)
    dials: dict[str, Any] = {"planner_low_watermark": 0.01, "planner_hot_expert_floor": 2}
    free, bound = (
        open_engine(artifact, memory_budget=budget, planner_layer_floor=floor, **dials)
        for floor in (0.0, 5.0)
    )
    pages = [engine._parts.precision.releasable() for engine in (free, bound)]
    assert 0 < pages[1] < pages[0]
    for engine, most in zip((free, bound), pages, strict=True):
        assert engine._parts.precision.release(10**6, "test") == most
        assert engine._parts.precision.releasable() == 0
        engine.check_integrity()
    assert min(bound.status().layer_bits.values()) >= 5
    assert free.status().mean_bits == 2
    # The floor is soft for a sequence that runs alone.
    assert len(bound.generate([random_prompt(150, 1)], GREEDY)) == 1


def test_the_thread_that_looks_for_trades_ends_with_the_engine(qwen: tuple[Any, Path]) -> None:
    engine = open_engine(qwen[1])
    precision: Any = engine._parts.precision
    precision._thinker = ThreadPoolExecutor(1, "pw-plan")
    precision._rebalance()
    engine.close()
    assert not any(thread.name.startswith("pw-plan") for thread in threading.enumerate())


def test_request_that_could_never_fit_is_refused_at_once(qwen: tuple[Any, Path]) -> None:
    _, artifact = qwen
    engine = open_engine(artifact, "static:6", memory_budget=tight_budget(artifact, 60, "static:6"))
    limit = engine.max_model_len
    assert 30 <= limit < 256
    with pytest.raises(
        RequestError, match=rf"{limit} tokens .*but {limit + 1} are asked"
    ) as refused:
        engine.add_request("a", random_prompt(limit - 3, 0), SamplingParams(max_tokens=4))
    assert refused.value.code == "context_length_exceeded"
    engine.generate([random_prompt(limit - 4, 0)], SamplingParams(max_tokens=4, temperature=0))
    adaptive = open_engine(artifact, memory_budget=tight_budget(artifact, 60))
    assert adaptive.max_model_len > limit


def test_contexts_too_short_for_use_are_told_at_the_start(
    qwen: tuple[Any, Path], caplog: pytest.LogCaptureFixture
) -> None:
    _, artifact = qwen
    budget = tight_budget(artifact, 60, "static:6")
    caplog.clear()
    engine = open_engine(artifact, "static:6", memory_budget=budget)
    limit, stated = engine.max_model_len, engine._parts.stated_model_len
    (told,) = [line for line in caplog.messages if line.startswith("contexts have")]
    assert f"contexts have {limit} tokens at most, of {stated}: " in told
    assert "lower --max-num-batched-tokens (32) or --max-num-seqs (8), or raise --mem" in told
    caplog.clear()
    open_engine(artifact, "static:6", memory_budget=budget, max_model_len=limit)  # as asked for
    open_engine(artifact, "static:6")
    assert "contexts have" not in caplog.text


def test_bad_requests_leave_the_engine_alive(qwen: tuple[Any, Path]) -> None:
    _, artifact = qwen
    engine = open_engine(artifact, "static:3", max_num_queued_reqs=2)
    with pytest.raises(RequestError, match="the prompt is empty"):
        engine.add_request("a", [], GREEDY)
    for token in (-1, 260, 2**31, 2**63):
        with pytest.raises(RequestError, match=f"outside the vocabulary of 260: {token}"):
            engine.add_request("a", [5, token], GREEDY)
    engine.add_request("a", [5], GREEDY)
    engine.add_request("b", [5], GREEDY)
    with pytest.raises(RequestError, match="queue is full") as refused:
        engine.add_request("c", [5], GREEDY)
    assert refused.value.status == 503
    assert engine.abort("a") is not None
    assert engine.abort("nobody") is None
    while engine.has_work():
        engine.step()
    assert engine.status().finished == 1
    assert engine.status().pages_kv == 0


def test_budget_too_small_says_what_is_needed(qwen: tuple[Any, Path]) -> None:
    _, artifact = qwen
    with pytest.raises(BudgetError, match=r"\(100,000 bytes\) .* are the least") as error:
        open_engine(artifact, memory_budget=100_000)
    told = error.value.message.split("too small: ")[1]
    needed = int(told.split("(")[1].split(" bytes")[0].replace(",", ""))
    engine = open_engine(artifact, memory_budget=needed)
    assert engine.max_model_len >= 2
    with pytest.raises(BudgetError):
        open_engine(artifact, memory_budget=needed - engine.status().page_bytes)


def test_replaying_a_trace_gives_the_same_tokens(qwen: tuple[Any, Path], tmp_path: Path) -> None:
    _, artifact = qwen
    budget = tight_budget(artifact, kv_tokens=80)
    prompts = [random_prompt(50 + 5 * seed, seed) for seed in range(6)]
    params = [SamplingParams(temperature=0.8, seed=s, max_tokens=5 + 20 * s) for s in range(6)]
    trace = tmp_path / "trace.jsonl"
    dials = {"planner_low_watermark": 0.01, "planner_high_watermark": 0.03}
    recorded = open_engine(artifact, memory_budget=budget, trace=trace, **dials)
    first = recorded.generate(prompts, params)
    recorded.close()
    events = [json.loads(line) for line in trace.read_text().splitlines()]
    assert all(event["reason"] for event in events if "layer" in event)
    counts = {e: sum(event["event"] == e for event in events) for e in ("reduce", "commit_raise")}
    assert counts["reduce"] > 10
    assert counts["commit_raise"] > 0

    copy = tmp_path / "copy.jsonl"
    replayed = open_engine(artifact, f"replay:{trace}", memory_budget=budget, trace=copy, **dials)
    assert replayed.generate(prompts, params) == first
    replayed.close()
    changes = [
        {k: v for k, v in event.items() if k != "damage"} for event in events if "layer" in event
    ]
    again = [json.loads(line) for line in copy.read_text().splitlines()]
    assert [
        {k: v for k, v in event.items() if k != "damage"} for event in again if "layer" in event
    ] == changes[: sum("layer" in event for event in again)]
    assert recorded.status().preemptions == replayed.status().preemptions


def test_replay_refuses_the_trace_of_another_artifact(
    qwen: tuple[Any, Path], tmp_path: Path
) -> None:
    _, artifact = qwen
    trace = tmp_path / "trace.jsonl"
    start = {"event": "start", "format": "pw-trace-1", "artifact": "ab", "bits": []}
    trace.write_text(json.dumps(start | {"pages": 9, "page_bytes": 4096}) + "\n")
    with pytest.raises(ConfigError, match="recorded with another artifact: ab"):
        open_engine(artifact, f"replay:{trace}")
    trace.write_text("no json\n")
    with pytest.raises(ConfigError, match="not a precision trace"):
        open_engine(artifact, f"replay:{trace}")


def test_greedy_planner_and_exact_residual_serve_too(qwen: tuple[Any, Path]) -> None:
    _, artifact = qwen
    budget = tight_budget(artifact, kv_tokens=80)
    for planner in ({"planner_planner": "greedy"}, {"planner_residual": "exact"}):
        engine = open_engine(artifact, memory_budget=budget, **planner)
        prompts = [random_prompt(60, seed) for seed in range(4)]
        assert min(status.mean_bits for status in run(engine, prompts, GREEDY)) < 6
        assert engine.status().finished == 4


def test_planes_change_hands_when_routing_moves_on(qwen: tuple[Any, Path]) -> None:
    """Under steady pressure, bits follow the experts that are busy now, at the same bytes."""
    _, artifact = qwen
    budget = tight_budget(artifact, 10, "static:3")
    engine = open_engine(
        artifact,
        memory_budget=budget,
        planner_low_watermark=0.0,
        planner_rebalance_steps=8,
        planner_routing_window=64,
        planner_routing_prior=1,
        planner_cold_multiplier=0.01,
        planner_hot_multiplier=100.0,
        planner_hot_mass=1.2,
    )
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    for _ in run(engine, [[7] * 4, [9] * 4], params):
        pass
    reasons = [plan["reason"] for plan in engine.status().plan_history]
    assert "rebalance" in reasons
    trades = [plan for plan in engine.status().plan_history if plan["reason"] == "rebalance"]
    assert all(plan["damage"] < 0 for plan in trades)


def test_a_plan_says_which_mean_bits_it_leads_to(qwen: tuple[Any, Path]) -> None:
    """Of raises, too, whose planes are still on their way when the plan is made."""
    engine = open_engine(qwen[1], memory_budget=tight_budget(qwen[1], kv_tokens=80))
    for _ in run(engine, [random_prompt(150, seed) for seed in range(4)], GREEDY):
        pass
    low = engine.status().mean_bits
    assert low < 6
    settle(engine)
    plans = engine.status().plan_history
    down = next(plan for plan in plans if plan["damage"] > 0)
    assert down["mean_bits"] < 6
    assert plans[-1]["reason"] == "idle"
    assert plans[-1]["mean_bits"] == 6


def test_a_replay_that_diverges_serves_on(qwen: tuple[Any, Path], tmp_path: Path) -> None:
    """Other requests than the recorded ones: what cannot be repeated is left out, nobody fails."""
    _, artifact = qwen
    budget = tight_budget(artifact, kv_tokens=80)
    trace = tmp_path / "trace.jsonl"
    recorded = open_engine(artifact, memory_budget=budget, trace=trace)
    recorded.generate([random_prompt(10, 0)], GREEDY)
    recorded.close()
    replayed = open_engine(artifact, f"replay:{trace}", memory_budget=budget)
    for _ in run(replayed, [random_prompt(225, seed) for seed in range(2)], GREEDY):
        pass
    assert replayed.status().finished == 2
    assert replayed._parts.precision.diverged > 0


@pytest.mark.parametrize("change", ["short", "wide", "negative", "stranger"])
def test_damaged_traces_are_refused(qwen: tuple[Any, Path], tmp_path: Path, change: str) -> None:
    _, artifact = qwen
    trace = tmp_path / "trace.jsonl"
    engine = open_engine(artifact, trace=trace)
    engine.close()
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    bits = lines[0]["bits"]
    lines[0]["bits"] = {
        "short": bits[:3], "wide": [9] * len(bits), "negative": [-1] * len(bits), "stranger": bits
    }[change]  # fmt: skip
    if change == "stranger":
        lines.append(
            {"event": "reduce", "step": 3, "layer": 99, "expert": 0, "module": "down", "from": 6,
             "to": 5, "pages": 1, "damage": 0.0, "reason": "x"}
        )  # fmt: skip
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ConfigError, match="names blocks or widths"):
        open_engine(artifact, f"replay:{trace}")


@pytest.mark.parametrize("name", ["dense.safetensors", "tokenizer.json", "config.json"])
def test_a_damaged_file_is_named_at_the_start(
    qwen: tuple[Any, Path], tmp_path: Path, name: str
) -> None:
    copy = tmp_path / "copy.pw"
    shutil.copytree(qwen[1], copy)
    data = bytearray((copy / name).read_bytes())
    data[-20] ^= 1
    (copy / name).write_bytes(data)
    with pytest.raises(StoreError, match=rf"artifact is damaged: {name}"):
        open_engine(copy, "static:3")


@pytest.mark.parametrize("idle", [False, True])
def test_a_step_waits_for_few_raises_of_a_large_plan(qwen: tuple[Any, Path], idle: bool) -> None:
    engine = open_engine(qwen[1])
    table: Any = engine._parts.table
    begin, begun = table.begin_raise, list[int]()

    def counted(index: int, to_bits: int) -> Any:
        begun[-1] += 1
        return begin(index, to_bits)

    table.begin_raise = counted
    precision: Any = engine._parts.precision
    precision._pace.is_over = lambda: not idle
    if not idle:
        engine.add_request("r", [5, 6, 7], SamplingParams(max_tokens=200, ignore_eos=True))
    engine.set_policy("static:2")
    engine.set_policy("adaptive")
    turn: Any = engine.idle_turn if idle else engine.step
    while engine.status().mean_bits < 6:
        begun.append(0)
        turn()
        engine.check_integrity()
    assert max(begun) == (table.geometry.blocks if idle else 1)
    (planned,) = [p for p in engine.status().plan_history if p["moves"] == table.geometry.blocks]
    assert planned["mean_bits"] == 6


def test_room_for_less_than_a_plane_is_not_planned_for(qwen: tuple[Any, Path]) -> None:
    engine = open_engine(qwen[1])
    precision: Any = engine._parts.precision
    table: Any = engine._parts.table
    assert precision._least_raise() == math.inf  # all is at its widest
    engine.set_policy("static:3")
    engine.set_policy("adaptive")
    pages = table.cost_bytes() // engine.status().page_bytes
    least = int((pages[:, 2] - pages[:, 1]).min())  # from 3 bits to 4
    assert precision._least_raise() == least > 0
    runs = precision.plan_runs
    precision._reload(Decision(reload_pages=least - 1))
    assert (precision.plan_runs, precision.pending) == (runs, False)
    precision._reload(Decision(reload_pages=least))
    assert (precision.plan_runs, precision.pending) == (runs + 1, True)
