import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pw.config import PlannerConfig
from pw.planning.pressure import LONGEST_DWELL, Decision, PressurePolicy

TOTAL = 1000  # pages; low watermark 50, high 200
PAGE = 1 << 16
DIALS = {"idle_grace_seconds": 0.0, "low_watermark": 0.05, "high_watermark": 0.20}


def policy(**dials):
    return PressurePolicy(PlannerConfig(**(DIALS | dials)), PAGE)


def decide(judge, free, step=1000, forecast=0, below=1, moving=False, seconds=None, idle=False):
    return judge.decide(
        now_step=step,
        now_seconds=step * 0.01 if seconds is None else seconds,
        pages_free=free,
        pages_total=TOTAL,
        forecast_pages=forecast,
        bits_below_max=below,
        moving=moving,
        idle=idle,
    )


@pytest.mark.parametrize(
    ("free", "forecast", "pages", "reason"),
    [
        (50, 0, 1, "kv_pressure"),  # Eq. 7: T + 1 - F
        (0, 0, 51, "kv_pressure"),
        (20, 30, 61, "kv_pressure"),
        (100, 50, 1, "kv_forecast"),
        (100, 120, 71, "kv_forecast"),
    ],
)
def test_release_is_equation_7_with_a_forecast(free, forecast, pages, reason):
    assert decide(policy(), free, forecast=forecast) == Decision(pages, 0, reason)


@pytest.mark.parametrize("free", [51, 120, 200])
def test_nothing_moves_between_the_watermarks(free):
    assert decide(policy(), free) == Decision(reason="steady")


def test_an_engine_that_has_just_become_idle_waits_for_the_next_request():
    judge = policy(idle_grace_seconds=0.5)
    assert decide(judge, 100, seconds=7.0, idle=True).reason == "grace"
    assert decide(judge, 100, seconds=7.4, idle=True).reason == "grace"
    assert decide(judge, 100, seconds=7.45).reason == "steady"  # a request came and went
    assert decide(judge, 100, seconds=7.6, idle=True).reason == "grace"
    assert decide(judge, 100, seconds=8.2, idle=True).reload_pages == 49


def test_reload_stops_at_the_high_watermark():
    assert decide(policy(), 260, forecast=20) == Decision(reload_pages=40, reason="headroom")


def test_an_idle_engine_fills_to_just_above_the_low_watermark():
    assert decide(policy(), 100, idle=True) == Decision(reload_pages=49, reason="idle")
    assert decide(policy(), 51, idle=True) == Decision(reason="steady")
    assert decide(policy(), 30, idle=True) == Decision(reason="steady")


def test_pages_that_a_settled_load_never_needs_go_back_to_planes():
    judge = policy(settle_steps=10, dwell_steps=1)
    frees = [120, 90, 110] * 10  # the load swings by 30 pages
    found = [decide(judge, free, step=1000 + i) for i, free in enumerate(frees)]
    assert [d.reason for d in found[:10]] == ["steady"] * 10
    assert found[10] == Decision(reload_pages=90 - 51, reason="settled")


def test_what_a_settled_load_has_given_is_not_given_twice():
    judge = policy(settle_steps=10, dwell_steps=1)
    given = 0
    for step in range(100):
        decision = decide(judge, [120, 90, 110][step % 3] - given, step=step)
        given += decision.reload_pages
    assert given == 90 - 51
    assert judge.flaps == judge.releases == 0


def test_a_release_begins_the_judging_anew():
    judge = policy(settle_steps=10, dwell_steps=1)
    for step in range(8):
        decide(judge, 120, step=step)
    assert decide(judge, 40, step=8).release_pages == 11
    reasons = [decide(judge, 120, step=step).reason for step in range(9, 25)]
    assert reasons[:10] == ["steady"] * 10
    assert reasons[10] == "settled"


def test_flaps_lengthen_the_judging():
    judge = policy(settle_steps=4, dwell_steps=4)
    decide(judge, 300, step=0)
    decide(judge, 10, step=1)  # a flap: the dwell doubles
    reasons = [decide(judge, 120, step=step).reason for step in range(20, 30)]
    assert reasons.index("settled") == 8


def test_idle_turns_judge_nothing():
    judge = policy(settle_steps=4)
    for step in range(20):
        decide(judge, 52, step=step, idle=True)
    assert decide(judge, 120, step=20).reason == "steady"


def test_settling_can_be_switched_off():
    judge = policy(settle_steps=0)
    assert {decide(judge, 120, step=step).reason for step in range(300)} == {"steady"}


def test_full_width_and_raises_under_way_are_left_alone():
    assert decide(policy(), 900, below=0) == Decision(reason="at_max")
    assert decide(policy(), 900, moving=True) == Decision(reason="moving")
    assert decide(policy(), 10, moving=True).release_pages == 41


def test_reload_waits_for_the_dwell_after_a_release():
    judge = policy(dwell_steps=16)
    assert decide(judge, 10, step=5).release_pages
    assert decide(judge, 900, step=20) == Decision(reason="dwell")
    assert decide(judge, 900, step=21).reload_pages


def test_a_release_by_the_engine_itself_starts_the_dwell_too():
    judge = policy(dwell_steps=16)
    judge.note_release(100)
    assert decide(judge, 900, step=115).reason == "dwell"


def test_a_step_counts_as_one_release():
    judge = policy()
    decide(judge, 10, step=7)
    judge.note_release(7)
    assert judge.releases == 1


def test_flaps_lengthen_the_dwell_and_a_long_quiet_shortens_it():
    judge = policy(dwell_steps=10, transfer_budget_bytes=1 << 40)
    step, waits = 1, []
    for _ in range(6):
        assert decide(judge, 10, step=step).release_pages
        start = step
        while not decide(judge, 900, step=step).reload_pages:
            step += 1
        waits.append(step - start)
        step += 1
    assert waits == [10, 20, 40, 80, 80, 80]
    assert judge.flaps == 5
    step += 4 * LONGEST_DWELL * 10 + 1
    decide(judge, 10, step=step)
    assert decide(judge, 900, step=step + 10).reload_pages


def test_releases_in_a_row_keep_a_lengthened_dwell():
    judge = policy(dwell_steps=10)
    decide(judge, 10, step=0)
    assert decide(judge, 900, step=10).reload_pages
    for step in (11, 12, 13):
        decide(judge, 10, step=step)
    assert judge.flaps == 1
    assert decide(judge, 900, step=32).reason == "dwell"
    assert decide(judge, 900, step=33).reload_pages


def test_reload_spends_a_budget_per_second():
    judge = policy(transfer_budget_bytes=100 * PAGE)
    assert decide(judge, 900, step=1, seconds=0.0).reload_pages == 100  # a full bucket
    assert decide(judge, 900, step=2, seconds=0.1).reason == "transfer_budget"
    assert decide(judge, 900, step=3, seconds=0.9).reason == "transfer_budget"
    assert decide(judge, 900, step=4, seconds=9.0).reload_pages == 100
    assert decide(judge, 205, step=5, seconds=9.06).reload_pages == 5  # all that is wanted


def test_a_clock_that_goes_back_earns_nothing():
    judge = policy(transfer_budget_bytes=100 * PAGE)
    decide(judge, 900, step=1, seconds=50.0)
    assert decide(judge, 900, step=2, seconds=10.0).reason == "transfer_budget"


def test_a_reload_without_moves_is_paid_back_and_not_asked_for_again_at_once():
    judge = policy(dwell_steps=16, transfer_budget_bytes=100 * PAGE)
    found = decide(judge, 203, step=1, seconds=0.0)
    judge.reload_refused(1, found)
    assert judge.reloads == 0
    assert decide(judge, 203, step=16, seconds=0.0).reason == "dwell"
    assert decide(judge, 900, step=17, seconds=0.0).reload_pages == 100


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, TOTAL),
    st.integers(0, TOTAL),
    st.booleans(),
    st.floats(0, 0.5),
    st.floats(0.01, 0.5),
)
def test_a_decision_carried_out_in_full_calls_for_no_opposite_one(free, forecast, idle, low, gap):
    judge = policy(low_watermark=low, high_watermark=min(low + gap, 1.0), dwell_steps=0)
    forecast = 0 if idle else forecast
    first = decide(judge, free, forecast=forecast, idle=idle)
    assert not (first.release_pages and first.reload_pages)
    free += first.release_pages - first.reload_pages
    second = decide(judge, free, step=1001, forecast=forecast)
    if first.reload_pages:
        assert not second.release_pages
    if first.release_pages:
        assert free - forecast == math.ceil(low * TOTAL) + 1
        assert not second.reload_pages
        assert not second.release_pages


def swing(judge, period, steps):
    """Bytes moved up by a demand that jumps between 0 and 800 of 1,000 pages."""
    weights, most, moved = 900, 900, 0
    for step in range(steps):
        demand = 800 if (step // period) % 2 else 0
        free = TOTAL - weights - demand
        found = decide(judge, free, step=step, below=most - weights)
        weights -= found.release_pages
        up = min(found.reload_pages, most - weights)
        weights += up
        moved += up
    return moved


def test_a_swinging_demand_moves_less_the_longer_the_dwell_grew():
    steps, period = 4000, 20
    cycles = steps // (2 * period)
    memoryless = policy(dwell_steps=0, transfer_budget_bytes=1 << 40)
    calm = policy(dwell_steps=16, transfer_budget_bytes=1 << 40)
    every_time = swing(memoryless, period, steps)
    assert every_time > 600 * (cycles - 1)
    assert swing(calm, period, steps) < every_time / 3
    assert calm.flaps > 0
