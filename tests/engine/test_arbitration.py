"""Who gets memory when: alternating demand, long beside short, stalls, addresses, bytes.

The names in brackets are those of the cases and figures in the project's test plan: L6 alternating
demand, L8 one full context among short requests, H10 addresses under plans, H11 weights that free
their memory, H12 nobody stalls.
"""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pw.engine import Engine
from pw.engine.precision import adaptive as adaptive_module
from pw.engine.request import SamplingParams
from pw.planning.bits_file import write_bits
from support.engines import open_engine, random_prompt, tight_budget

STEP_SECONDS = 0.01


class Clock:
    """Time that passes only when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        clock = types.SimpleNamespace(monotonic=lambda: self.now, perf_counter=lambda: self.now)
        monkeypatch.setattr(adaptive_module, "time", clock)

    def step(self, engine: Engine) -> None:
        """A step, or a turn of an idle engine."""
        self.now += STEP_SECONDS
        if engine.has_work():
            engine.step()
        else:
            engine.idle_turn()


def alternate(
    engine: Engine, clock: Clock, period: float, cycles: int = 8
) -> tuple[int, list[int]]:
    """Demand comes and goes; the working difference, and bytes copied in each cycle."""
    for _ in range(200):
        clock.step(engine)
    rest = engine.status()
    lowest, copied = rest.pages_weights, []
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    for cycle in range(cycles):
        before, until = engine.status().bytes_reloaded, clock.now + period
        for number in range(3):
            engine.add_request(f"{cycle}-{number}", random_prompt(150, cycle * 3 + number), params)
        while engine.has_work() or clock.now < until:
            clock.step(engine)
            lowest = min(lowest, engine.status().pages_weights)
        copied.append(engine.status().bytes_reloaded - before)
        engine.check_integrity()
    return (rest.pages_weights - lowest) * rest.page_bytes, copied


@pytest.mark.parametrize("period", [0.1, 0.4, 1.0, 10.0])
def test_alternating_demand_moves_at_most_twice_the_working_difference(
    qwen: tuple[Any, Path], period: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """[L6] Planes that would only come to go again stay away; slow changes are followed."""
    clock = Clock(monkeypatch)
    budget = tight_budget(qwen[1], kv_tokens=80)
    engine = open_engine(
        qwen[1],
        memory_budget=budget,
        planner_low_watermark=0.01,
        planner_idle_grace_seconds=0.5,
        planner_dwell_steps=16,
    )
    difference, copied = alternate(engine, clock, period)
    assert difference > 0
    released = engine.status().bytes_released
    if period < 0.5:  # shorter than the grace of an idle engine: given up once, for all cycles
        assert sum(copied) + released <= 2 * difference
    else:
        # A plane given up is not copied; a raise copies its LUT too, in place of the narrower.
        assert max(copied) <= 2 * difference
        assert released <= len(copied) * difference
    pressure = engine._parts.precision._pressure  # type: ignore[attr-defined]
    if period == 1.0:
        assert pressure.flaps > 0
        assert sum(copied[4:]) < sum(copied[:4])  # each flap lengthens the wait
    if period == 10.0:
        assert min(copied) > 0
        assert engine.status().mean_bits == 6


def test_a_full_context_among_short_requests_waits_for_those_that_run_and_no_longer(
    qwen: tuple[Any, Path],
) -> None:
    """[L8] First come, first served: the bound is the longest rest of what runs before it."""
    _, artifact = qwen
    budget = tight_budget(artifact, kv_tokens=300, policy="static:4")
    engine = open_engine(artifact, "static:4", memory_budget=budget, max_num_queued_reqs=300)
    context = engine.max_model_len
    short = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    full = SamplingParams(temperature=0, max_tokens=context - 200, ignore_eos=True)
    for number in range(60):
        if number == 20:
            engine.add_request("full", random_prompt(200, 1), full)
        engine.add_request(f"s{number}", random_prompt(12, number), short)
    scheduler = engine._parts.scheduler
    order: list[str] = []
    headed = bound = waited = None
    steps = 0
    while engine.has_work():
        if headed is None and scheduler.waiting and scheduler.waiting[0].request_id == "full":
            headed = steps
            bound = 1 + max(seq.remaining for seq in scheduler.running)
        for output in engine.step():
            assert output.error is None
            if output.completion_tokens == 1:
                order.append(output.request_id)
        steps += 1
        if headed is not None and waited is None and "full" in {
            seq.request_id for seq in scheduler.running
        }:  # fmt: skip
            waited = steps - headed
        engine.check_integrity()
    assert headed is not None
    assert bound is not None
    assert waited is not None
    assert waited <= bound
    status = engine.status()
    assert status.finished == 61
    assert status.failed == 0
    arrivals = [*(f"s{n}" for n in range(20)), "full", *(f"s{n}" for n in range(20, 60))]
    started = [name for name in order if name != "full"]
    assert started == [name for name in arrivals if name != "full"]  # nobody overtakes
    behind = order.index("s20")
    assert order.index("s19") < behind  # those before it were not held up
    assert len(order) == 61


def test_kv_for_one_sequence_and_a_slow_mover_stall_nobody(qwen: tuple[Any, Path]) -> None:
    """[H12] KV for 1.2 sequences at the least widths: the oldest gains a token at every turn."""
    _, artifact = qwen
    least = open_engine(artifact, "static:2").status()
    length, new = 60, 40
    pages = open_engine(artifact, "static:2").pages_for_tokens(length + new) * 12 // 10
    needed = least.bytes.total - least.bytes.free + pages * least.page_bytes
    engine = open_engine(artifact, memory_budget=needed, max_model_len=length + new)
    mover = engine._parts.mover
    assert mover is not None
    poll, calls = mover.poll, iter(range(10**9))
    mover.poll = lambda: poll() if next(calls) % 50 == 0 else []  # type: ignore[method-assign]
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    for number in range(16):
        engine.add_request(f"r{number}", random_prompt(length, number), params)
    scheduler = engine._parts.scheduler
    steps = 0
    while engine.has_work():
        oldest = scheduler.running[0] if scheduler.running else None
        before = None if oldest is None else oldest.computed
        engine.step()
        steps += 1
        engine.check_integrity()
        if oldest is not None and oldest in scheduler.running:
            assert scheduler.running[0] is oldest
            assert oldest.computed > (before or 0)
    assert engine.status().finished == 16
    prefill = -(-length // 32)
    assert steps <= 16 * (prefill + new)  # no turn of the oldest was lost


def test_raises_under_way_are_called_back_before_any_plane_is_given_up(
    qwen: tuple[Any, Path],
) -> None:
    engine = open_engine(qwen[1], planner_high_watermark=0.06)
    parts = engine._parts
    assert parts.table is not None
    parts.precision.release(10**6, "test")
    for _ in range(10):
        engine.idle_turn()
        if parts.table.in_transfer:
            break
    under_way = sum(len(move.pages) for move in parts.table.in_transfer.values())
    bits, free = parts.table.committed.copy(), parts.pool.free_count
    assert under_way > 4
    assert parts.precision.release(3, "test") == under_way
    assert parts.pool.free_count == free + under_way
    assert not parts.table.in_transfer
    assert (parts.table.committed == bits).all()
    engine.check_integrity()


def test_plans_move_no_address_and_change_no_answer(qwen: tuple[Any, Path], tmp_path: Path) -> None:
    """[H10] What a captured graph would have read after 200 plans is still what it must read."""
    engine = open_engine(qwen[1], enable_prefix_caching=False)
    parts = engine._parts
    assert parts.table is not None
    geometry = parts.table.geometry

    def addresses() -> list[int]:
        tables = [
            parts.table.pages_of(slot, module)  # type: ignore[union-attr]
            for slot in range(len(geometry.layers))
            for module in ("gate_up", "down")
        ]
        tensors = [t for pages in tables for t in vars(pages).values() if torch.is_tensor(t)]
        dense = [p for p in parts.skeleton.model.parameters() if not p.is_meta]
        return [tensor.data_ptr() for tensor in (*tensors, *dense, parts.arena.pages)]

    before = addresses()
    assert len(before) > 4 * len(geometry.layers)
    prompt = random_prompt(20, 1)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=0)
    generator = torch.Generator().manual_seed(0)
    fixed: dict[tuple[int, ...], Any] = {}
    plans = 0
    while plans < 200:
        count = int(torch.randint(1, 60, (1,), generator=generator))
        parts.precision.release(count, "test")
        for _ in range(int(torch.randint(0, 12, (1,), generator=generator))):
            engine.idle_turn()
        plans = engine.status().plans
        if plans % 40 < 2 and len(fixed) < 5:
            bits, answer = parts.table.committed.tolist(), engine.generate([prompt], params)
            if parts.table.committed.tolist() == bits:  # nothing has come back meanwhile
                fixed[tuple(bits)] = answer
    assert addresses() == before
    engine.check_integrity()
    assert len(fixed) > 1
    # The same widths, loaded afresh instead of moved to.
    for widths, answer in fixed.items():
        file = tmp_path / "bits.json"
        write_bits(file, geometry, np.array(widths))
        fresh = open_engine(qwen[1], f"static:{file}", enable_prefix_caching=False)
        assert fresh.generate([prompt], params) == answer


def resident_bytes() -> int:
    """Memory of this process as the system sees it."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_weights_load_beside_five_percent_and_give_their_bytes_to_kv_at_once(
    qwen: tuple[Any, Path],
) -> None:
    """[H11] No second copy at the start, freed pages usable in the same step, nothing grows."""
    _, artifact = qwen
    roomy = open_engine(artifact, "static:6").status()
    resident = roomy.bytes.total - roomy.bytes.free
    engine = open_engine(artifact, memory_budget=resident * 105 // 100, planner_low_watermark=0.0)
    parts = engine._parts
    assert engine.status().mean_bits > 5
    seen = 0
    for cycle in range(100):
        free = parts.pool.free_count
        freed = parts.precision.release(40, "test")
        assert freed > 0
        assert parts.pool.free_count == free + freed
        sequences = [parts.kv.open()]  # take all of it before any other step
        tokens = 16
        while parts.kv.pages_to_grow(sequences[-1], tokens) <= parts.pool.free_count:
            parts.kv.grow(sequences[-1], tokens)
            tokens += 16
            if tokens > engine.max_model_len:
                sequences.append(parts.kv.open())
                tokens = 16
        assert parts.kv.used_pages > free
        engine.check_integrity()
        for sequence in sequences:
            parts.kv.close(sequence)
        for _ in range(60):
            if not engine.idle_turn():
                break
        if cycle == 20:
            seen = resident_bytes()
    engine.check_integrity()
    assert engine.status().bytes_over_budget == 0
    assert resident_bytes() - seen < engine.status().page_bytes * 64
