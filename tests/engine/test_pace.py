"""How long safe points may take, what is done beside steps, what becomes of plans and trades."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pw.engine.precision import adaptive
from pw.engine.precision.pace import Pace
from pw.engine.request import SamplingParams
from pw.planning.planner import Plan, plan
from pw.planning.rebalance import Trade
from support.engines import open_engine, tight_budget


@pytest.fixture
def seconds() -> list[float]:
    return [0.0]


def test_a_safe_point_has_a_part_of_the_shortest_step_of_late(seconds: list[float]) -> None:
    pace = Pace(lambda: seconds[0])
    pace.begin(idle=False)
    assert pace.is_over()  # nothing is known yet: one thing at a time
    for step in (8.0, 80.0, 16.0):
        seconds[0] += step
        pace.begin(idle=False)
    seconds[0] += 0.9
    assert not pace.is_over()
    seconds[0] += 0.1
    assert pace.is_over()
    for _ in range(8):
        seconds[0] += 32.0
        pace.begin(idle=False)
    seconds[0] += 3.9
    assert not pace.is_over()
    seconds[0] += 0.1
    assert pace.is_over()


def test_an_idle_engine_has_time_and_says_nothing_about_steps(seconds: list[float]) -> None:
    pace = Pace(lambda: seconds[0])
    for step in (8.0, 8.0):
        seconds[0] += step
        pace.begin(idle=False)
    pace.begin(idle=True)
    seconds[0] += 1000
    assert not pace.is_over()
    pace.begin(idle=False)
    seconds[0] += 1.0
    assert pace.is_over()


def trade_at(bits: NDArray[np.int64]) -> tuple[int, int, Trade]:
    """The widest block, the narrowest, and a trade: 2 bits for one, a bit more for the other."""
    wide, narrow = (int(at(bits)) for at in (np.argmax, np.argmin))
    down = Plan(*(np.array([n]) for n in (wide, bits[wide], 2, 0, 0.0)), True, 0.0)
    up = Plan(*(np.array([n]) for n in (narrow, bits[narrow], bits[narrow] + 1, 0, 0.0)), True, 0.0)
    return wide, narrow, Trade(down, up)


def test_a_trade_is_made_a_little_at_a_time_and_its_plan_beside_the_steps(
    qwen: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = tight_budget(qwen[1], 10, "static:3")
    engine = open_engine(qwen[1], memory_budget=budget, planner_low_watermark=0.0)
    precision: Any = engine._parts.precision
    precision._thinker = ThreadPoolExecutor(1)  # as on a GPU
    precision._pace.is_over = lambda: True
    engine.add_request("r", [5, 6, 7], SamplingParams(max_tokens=200, ignore_eos=True))
    for _ in range(40):
        engine.step()
    bits = precision._table.committed.copy()
    wide, narrow, trade = trade_at(bits)
    asked = threading.Event()

    def slow(*_: object) -> tuple[Trade, float]:
        asked.wait(60)
        return trade, 0.0

    monkeypatch.setattr(adaptive, "_find_trade", slow)
    precision._rebalance()
    engine.step()
    assert precision.pending
    assert (precision._table.committed == bits).all()  # nobody has waited
    asked.set()
    precision._sought.result()
    changed = []
    for _ in range(3):
        engine.step()
        engine.check_integrity()
        changed.append((precision._table.desired != bits).nonzero()[0].tolist())
    assert changed[:2] == [[wide], sorted((wide, narrow))]
    assert precision._table.committed[narrow] == bits[narrow] + 1
    assert engine.status().plan_history[-1]["reason"] == "rebalance"
    precision._rebalance()
    engine.set_policy("static:2")  # what is sought is forgotten
    assert precision._sought is None


def test_a_trade_that_was_looked_for_before_a_promise_does_not_break_it(
    qwen: tuple[Any, Path],
) -> None:
    engine = open_engine(qwen[1], memory_budget=tight_budget(qwen[1], 10, "static:3"))
    precision: Any = engine._parts.precision
    bits = precision._table.committed.copy()
    wide, _, trade = trade_at(bits)
    assert bits[wide] > 2
    precision.floor = int(bits[wide])  # of a request that was admitted meanwhile
    precision._trade(trade, 0.0)
    while precision._agenda:
        precision._begin_planned(0)
    assert precision._table.committed[wide] == bits[wide]


def test_a_trade_counts_the_moves_that_were_made(qwen: tuple[Any, Path]) -> None:
    """Its second reduction is refused: neither that nor the raise behind it is counted."""
    engine = open_engine(qwen[1], memory_budget=tight_budget(qwen[1], 10, "static:3"))
    precision: Any = engine._parts.precision
    table, page = precision._table, engine.status().page_bytes
    bits = table.committed.copy()
    wide, other = (int(block) for block in np.argsort(-bits, kind="stable")[:2])
    narrow, cost = int(np.argmin(bits)), table.cost_bytes()
    at = np.array([wide, other])
    freed = np.array([cost[b, bits[b] - 2] - cost[b, bits[b] - 3] for b in at])
    precision._pace.is_over = lambda: False
    down = Plan(at, bits[at] + [0, 1], bits[at] - 1, freed, np.zeros(2), True, 0.0)
    up = Plan(*(np.array([n]) for n in (narrow, bits[narrow], 6, 0, -1.0)), True, 0.0)
    made = precision.transitions
    precision._trade(Trade(down, up), 0.0)
    record = engine.status().plan_history[-1]
    assert record["moves"] == precision.transitions - made == 1
    assert (record["pages"], record["pages_wanted"]) == (freed[0] // page, freed.sum() // page)


@pytest.mark.parametrize("refused", ["layer floor", "stale"])
def test_a_trade_ends_where_its_reductions_are_refused(
    qwen: tuple[Any, Path], refused: str
) -> None:
    """Its raises would take pages that were freed for KV."""
    budget = tight_budget(qwen[1], kv_tokens=80)
    floor = 5.0 if refused == "layer floor" else 0.0
    engine = open_engine(
        qwen[1], memory_budget=budget, planner_layer_floor=floor, planner_hot_expert_floor=2
    )
    precision: Any = engine._parts.precision
    precision.release(10**6 if floor else 40, "test")  # to the floor of every layer
    bits, free = precision._table.committed.copy(), precision._pool.free_count
    wide, narrow, trade = trade_at(bits)
    assert bits[wide] > bits[narrow]
    assert free >= precision._table.raise_pages(narrow, int(bits[narrow]) + 1) > 0
    if not floor:
        trade.down.from_bits[0] -= 1
    plans = precision.plans
    precision._trade(trade, 0.0)
    assert precision.plans == plans  # what is not made is not told as a plan
    assert not precision._agenda
    assert not precision._table.in_transfer
    assert (precision._table.committed == bits).all()
    assert precision._pool.free_count == free
    engine.check_integrity()


def test_layer_floors_bound_what_an_older_plan_has_left(qwen: tuple[Any, Path]) -> None:
    budget = tight_budget(qwen[1], kv_tokens=80)
    dials: dict[str, Any] = {"planner_low_watermark": 0.01, "planner_hot_expert_floor": 2}
    engine = open_engine(qwen[1], memory_budget=budget, planner_layer_floor=5.0, **dials)
    precision: Any = engine._parts.precision
    state = precision._state(hard=False)
    precision._reserve.fill(state, plan(state, state.total_bytes), precision._turn)
    table = precision._table
    size = len(state.bits) // len(table.geometry.layers)
    for block in range(size):  # somebody else takes what the first layer has to give
        if table.committed[:size].sum() - 1 >= 5 * size:
            table.reduce(block, int(table.committed[block]) - 1)
    before = precision.transitions
    precision.release(10**6, "test")
    assert min(engine.status().layer_bits.values()) >= 5
    made = precision.transitions - before
    assert engine.status().plan_history[-1]["moves"] == made > 0
    plans, releases = precision.plans, precision._pressure.releases
    precision._turn += 1
    precision._reserve.fill(state, plan(state, state.total_bytes), precision._turn)
    assert precision._reserve.lasts(precision._turn)
    assert precision.release(10**6, "test") == 0  # all are refused
    assert (precision.plans, precision._pressure.releases) == (plans, releases)
    engine.check_integrity()


def test_under_pressure_one_plan_serves_many_steps(
    qwen: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adaptive, "_RESERVE_SHARE", 8)  # of an arena of a few hundred pages
    engine = open_engine(qwen[1], memory_budget=tight_budget(qwen[1], kv_tokens=200))
    precision: Any = engine._parts.precision
    release, asked = precision.release, list[tuple[int, int]]()

    def noted(pages: int, reason: str, **options: Any) -> int:
        freed: int = release(pages, reason, **options)
        asked.append((pages, freed))
        return freed

    precision.release = noted
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    for number in range(5):
        engine.add_request(f"r{number}", [5 + number], params)
    while engine.has_work():
        engine.step()
        engine.check_integrity()
    assert len(asked) > 10
    assert precision.plan_runs < len(asked) / 2
    assert all(wanted <= freed < wanted + 20 for wanted, freed in asked)
