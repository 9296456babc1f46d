import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pw.errors import BudgetError
from pw.planning.ladder import Ladder
from pw.planning.planner import (
    Move,
    PlannerState,
    allocate,
    in_steps,
    plan,
    plan_greedy,
    plan_reload,
)
from support.planning import PAGE, levelled, outcomes, qwen_like, states

EXACT = settings(max_examples=100, deadline=None)


def state(cost, damage, bits=None, floors=None, ceil=None, **more):
    """A hand-made state at widths 2, 3, ...; columns of `cost` (pages) and `damage` ascend."""
    cost = np.array(cost) * PAGE
    n, W = cost.shape
    widths = np.arange(2, 2 + W)
    top = np.full(n, widths[-1])
    return PlannerState(
        widths,
        top if bits is None else np.array(bits),
        np.full(n, 2) if floors is None else np.array(floors),
        top if ceil is None else np.array(ceil),
        cost,
        np.array(damage, dtype=float),
        **more,
    )


def hull_step_damage(view):
    """Largest damage of one hull step of any block."""
    cost, damage = view.transposed()
    ladder = Ladder.descend(cost, damage, view.index(view.bits), view.index(view.floors))
    price = ladder.slopes()
    x, worst = np.diff(ladder.x, axis=0), 0.0
    for block in range(price.shape[1]):
        for slope in np.unique(price[np.isfinite(price[:, block]), block]):
            run = price[:, block] == slope  # equal prices within a block are one step
            worst = max(worst, float((slope * x[run, block]).sum()))
    return worst


def exact_least_damage(view, pages):
    """Least damage of releasing `pages`, by dynamic programming over blocks and pages."""
    best = np.full(pages + 1, np.inf)
    best[0] = 0.0
    damage, index = levelled(view), view.index(view.bits)
    for block, now in enumerate(index):
        after = best.copy()
        for to in range(now):
            released = (view.cost_bytes[block, now] - view.cost_bytes[block, to]) // PAGE
            harm = damage[block, to] - damage[block, now]
            missing_before = np.maximum(np.arange(pages + 1) - released, 0)
            after = np.minimum(after, best[missing_before] + harm)
        best = after
    return float(best[pages])


def test_takes_the_cheapest_damage_per_byte_first():
    found = plan(state([[2, 4], [2, 6]], [[3.0, 0], [4.0, 0]]), 3 * PAGE)
    assert found.moves == (Move(1, 3, 2, 4 * PAGE, 4.0),)
    assert (found.bytes, found.damage, found.satisfied) == (4 * PAGE, 4.0, True)
    assert found.bound == pytest.approx(3.0)  # three of the four pages


def test_jumps_over_a_width_that_is_not_on_the_hull():
    # 4 -> 3 bits is dear, 3 -> 2 nearly free: half-way is never worth it for two pages.
    found = plan(state([[1, 2, 3], [1, 2, 3]], [[10, 9, 0], [8, 4, 0]]), 2 * PAGE)
    assert [move[:3] for move in found.moves] == [(1, 4, 2)]


def test_last_step_is_filled_with_the_least_damage():
    # The next hull step releases 5 pages; one page is missing and a dearer small step has it.
    found = plan(state([[0, 2], [0, 5], [0, 1]], [[1, 0], [5, 0], [2, 0]]), 3 * PAGE)
    assert [move.block for move in found.moves] == [0, 2]
    assert found.damage == 3.0


def test_small_steps_that_a_later_large_one_covers_are_given_back():
    # By price block 0 goes first; block 1 alone reaches the target.
    found = plan(state([[0, 1], [0, 4]], [[1, 0], [8, 0]]), 4 * PAGE)
    assert [move.block for move in found.moves] == [1]


def test_equal_prices_go_by_block_index():
    same = state([[1, 2, 3]] * 4, [[4, 1, 0]] * 4)
    assert [move[:3] for move in plan(same, 2 * PAGE).moves] == [(0, 4, 3), (1, 4, 3)]
    assert plan(same, 6 * PAGE).apply(same.bits).tolist() == [2, 2, 3, 3]
    assert plan_reload(replace(same, bits=np.full(4, 3)), 2 * PAGE).moves == (
        Move(0, 3, 4, PAGE, -1.0),
        Move(1, 3, 4, PAGE, -1.0),
    )


def test_zero_damage_is_taken_first_and_zero_bytes_never():
    found = plan(state([[0, 1], [5, 5], [0, 1]], [[1, 0], [0, 0], [0, 0]]), PAGE)
    assert found.moves == (Move(2, 3, 2, PAGE, 0.0),)


@EXACT
@given(states(), st.data())
def test_plan_is_bounded_by_the_relaxed_optimum(view, data):
    possible = list(outcomes(view))
    most = max(released for released, _ in possible)
    target = data.draw(st.integers(1, max(most, 1)))
    found = plan(view, target)
    assert found.satisfied == (target <= most)
    if not found.satisfied:
        assert found.bytes == most
        return
    least = min(damage for released, damage in possible if released >= target)
    close = 1e-9 * (1 + found.damage)
    assert found.bytes >= target
    assert found.bound <= least + close
    assert least <= found.damage + close
    assert found.damage <= found.bound + hull_step_damage(view) + close


@EXACT
@given(states(), st.data())
def test_plan_at_hull_vertices_is_exactly_optimal(view, data):
    """At every point that the relaxed problem reaches with whole steps the plan has its damage."""
    cost, damage = view.transposed()
    ladder = Ladder.descend(cost, damage, view.index(view.bits), view.index(view.floors))
    price = ladder.slopes()
    limits = np.unique(price[np.isfinite(price)])
    if not len(limits):
        return
    rungs = ladder.start + (price <= data.draw(st.sampled_from(list(limits)))).sum(axis=0)
    x, y = (values.sum() for values in ladder.at(rungs))
    found = plan(view, int(x))
    assert found.damage == pytest.approx(y, rel=1e-9, abs=1e-9)


@EXACT
@given(states(), st.integers(0, 60), st.sampled_from(["hull", "greedy"]))
def test_moves_are_legal_and_add_up(view, pages, method):
    found = plan(view, pages * PAGE, method=method)
    damage = levelled(view)
    assert len({move.block for move in found.moves}) == len(found.moves)
    for move in found.moves:
        old, new = (int(view.index(np.array([b]))[0]) for b in (move.from_bits, move.to_bits))
        assert move.from_bits == view.bits[move.block]
        assert view.floors[move.block] <= move.to_bits < move.from_bits
        assert move.bytes == view.cost_bytes[move.block, old] - view.cost_bytes[move.block, new] > 0
        harm = damage[move.block, new] - damage[move.block, old]
        assert move.damage == pytest.approx(harm)
        assert harm >= 0
    assert found.bytes == sum(move.bytes for move in found.moves)
    assert found.damage == pytest.approx(sum(move.damage for move in found.moves))
    assert found.satisfied == (found.bytes >= pages * PAGE)
    prices = [move.damage / move.bytes for move in found.moves]
    assert prices == sorted(prices)


@EXACT
@given(states())
def test_relaxed_damage_never_falls_with_the_target(view):
    most = max(released for released, _ in outcomes(view))
    bounds = [plan(view, target).bound for target in range(PAGE, most + 1, PAGE // 2)]
    assert all(b <= a * (1 + 1e-12) + 1e-12 for b, a in itertools.pairwise(bounds))


@pytest.mark.parametrize("seed", range(4))
def test_gap_to_the_exact_optimum_is_small_at_the_size_of_the_bundled_model(seed):
    view = qwen_like(blocks=64, widths=5, seed=seed)
    units = (view.cost_bytes // 32768) * PAGE  # the same problem in small pages
    view = replace(view, cost_bytes=units)
    most = int((units[:, -1] - units[:, 0]).sum()) // PAGE
    for pages in (3, most // 10, most // 3, 3 * most // 4):
        found, exact = plan(view, pages * PAGE), exact_least_damage(view, pages)
        assert exact - 1e-9 <= found.damage <= 1.02 * exact + 1e-9
        assert found.bound <= exact + 1e-9


@given(states(), st.integers(0, 40))
@EXACT
def test_any_leading_part_of_the_steps_of_a_plan_is_a_plan(view, pages):
    found = plan(view, pages * PAGE)
    steps = in_steps(view, found)
    released, damage = np.cumsum([(step.bytes, step.damage) for step in steps] or [(0, 0.0)], 0).T
    assert released[-1] == found.bytes
    assert damage[-1] == pytest.approx(found.damage, abs=1e-9)
    bits = view.bits.copy()
    for step in steps:
        assert step.to_bits < step.from_bits == bits[step.block]
        bits[step.block] = step.to_bits
    assert (bits == found.apply(view.bits)).all()
    for freed, harm in zip(released[:-1], damage, strict=False):
        limited = replace(view, floors=np.maximum(view.floors, np.minimum(bits, view.bits)))
        assert harm == pytest.approx(plan(limited, int(freed)).bound, abs=1e-9)


def test_hull_beats_greedy_where_blocks_must_give_more_than_one_plane():
    view = qwen_like(blocks=240)
    for share, ratio in ((0.05, 1.0), (0.1, 0.7), (0.2, 0.4)):
        target = int(share * view.total_bytes)
        hull, greedy = plan(view, target), plan(view, target, method="greedy")
        assert hull.satisfied
        assert greedy.satisfied
        assert hull.damage < ratio * greedy.damage


def test_hull_meets_a_target_that_one_greedy_pass_misses():
    view = qwen_like(blocks=240)
    target = int(0.3 * view.total_bytes)
    assert plan(view, target).satisfied
    assert not plan(view, target, method="greedy").satisfied


def test_greedy_is_the_papers_algorithm_word_for_word():
    view = qwen_like(blocks=60, seed=3)
    view = replace(view, floors=np.where(np.arange(60) % 7 == 0, 5, 3))
    target = view.total_bytes // 8
    actions = []
    for block in range(60):
        for to in range(view.widths[0], view.bits[block]):
            if to >= view.floors[block]:
                new, old = to - view.widths[0], view.bits[block] - view.widths[0]
                bytes_ = view.cost_bytes[block, old] - view.cost_bytes[block, new]
                harm = view.damage[block, new] - view.damage[block, old]
                actions.append((max(0.0, harm) / bytes_, block, to, int(bytes_)))
    chosen, released = {}, 0
    for _, block, to, bytes_ in sorted(actions):
        if released >= target:
            break
        if block not in chosen:
            chosen[block] = to
            released += bytes_
    found = plan_greedy(view, target)
    assert {move.block: move.to_bits for move in found.moves} == chosen
    assert found.bytes == released


@EXACT
@given(states(), st.integers(0, 60))
def test_reload_stays_within_its_bytes_and_leaves_nothing_that_fits(view, pages):
    budget = pages * PAGE
    found = plan_reload(view, budget)
    after = found.apply(view.bits)
    assert found.bytes <= budget
    assert (after >= view.bits).all()
    assert (after <= view.ceil).all()
    assert found.satisfied == (after == view.ceil).all()
    assert found.damage <= 0
    for block, bits in enumerate(after):
        if bits < view.ceil[block]:
            now = int(view.index(np.array([bits]))[0])
            step = view.cost_bytes[block, now + 1] - view.cost_bytes[block, now]
            assert step > budget - found.bytes


@EXACT
@given(states())
def test_everything_returns_to_its_ceiling_when_bytes_allow(view):
    found = plan_reload(view, 1 << 40)
    assert found.satisfied
    np.testing.assert_array_equal(found.apply(view.bits), view.ceil)


def test_reload_raises_by_benefit_per_byte():
    low = state([[0, 2, 4]] * 3, [[4, 1, 0], [9, 3, 0], [2, 1, 0]], bits=[2, 2, 2])
    # Benefits per step: block 1 has 6 then 3, block 0 has 3 then 1, block 2 has 1 then 1.
    assert plan_reload(low, 2 * PAGE).apply(low.bits).tolist() == [2, 3, 2]
    assert plan_reload(low, 4 * PAGE).apply(low.bits).tolist() == [3, 3, 2]
    assert plan_reload(low, 6 * PAGE).moves == (
        Move(1, 2, 4, 4 * PAGE, -9.0),
        Move(0, 2, 3, 2 * PAGE, -3.0),
    )


def test_blocks_below_their_floor_come_back_first():
    low = state([[0, 2, 4]] * 2, [[90, 30, 0], [2, 1, 0]], bits=[2, 2], floors=[2, 3])
    found = plan_reload(low, 4 * PAGE)
    assert found.apply(low.bits).tolist() == [3, 3]


def test_a_block_below_its_floor_is_not_moved_down():
    view = state([[0, 2, 4]] * 2, [[1, 0.5, 0], [9, 3, 0]], bits=[2, 4], floors=[3, 3])
    assert plan(view, 100 * PAGE).apply(view.bits).tolist() == [2, 3]


def test_what_comes_back_is_what_would_be_missed_most():
    """Down then up by the same bytes restores at least as much damage as any other reload."""
    full = qwen_like(blocks=48, widths=4)
    down = plan(full, full.total_bytes // 3)
    low = replace(full, bits=down.apply(full.bits))
    up = plan_reload(low, down.bytes)
    assert up.satisfied
    assert up.damage == pytest.approx(-down.damage)
    assert up.bytes == down.bytes


def test_blocks_just_reloaded_are_spared_unless_the_target_needs_them():
    view = state([[0, 2]] * 3, [[1, 0], [5, 0], [9, 0]])
    spared = np.array([True, False, False])
    assert [m.block for m in plan(view, 2 * PAGE, protected=spared).moves] == [1]
    assert [m.block for m in plan(view, 4 * PAGE, protected=spared).moves] == [1, 2]
    assert [m.block for m in plan(view, 6 * PAGE, protected=spared).moves] == [0, 1, 2]


@EXACT
@given(states(), st.floats(2, 6), st.integers(1, 40), st.sampled_from(["hull", "greedy"]))
def test_no_layer_falls_below_its_mean_bits(view, floor, pages, method):
    layer = np.arange(len(view.bits)) % 2
    view = replace(view, layer_of=layer, layer_floor=floor)
    after = plan(view, pages * PAGE, method=method).apply(view.bits)
    for slot in set(layer.tolist()):
        before, now = view.bits[layer == slot].mean(), after[layer == slot].mean()
        assert now >= min(before, floor) - 1e-9


def test_layer_floor_turns_a_plan_to_other_layers_and_then_refuses():
    view = state(
        [[0, 1, 2]] * 4, [[0.2, 0.1, 0]] * 2 + [[20, 10, 0]] * 2, layer_of=np.array([0, 0, 1, 1])
    )
    view = replace(view, layer_floor=3.5)
    assert plan(view, 2 * PAGE).apply(view.bits).tolist() == [3, 4, 3, 4]
    refused = plan(view, 3 * PAGE)
    assert not refused.satisfied
    assert refused.bytes == 2 * PAGE


def test_depth_cap_limits_one_plan():
    view = state([[0, 1, 2, 3]] * 2, [[3, 2, 1, 0]] * 2, bits=[5, 3]).limited(1)
    assert plan(view, 100 * PAGE).apply(view.bits).tolist() == [4, 2]
    assert plan_reload(view, 100 * PAGE).apply(view.bits).tolist() == [5, 4]


def test_allocation_fits_its_bytes_and_says_what_is_missing():
    view = qwen_like(blocks=48)
    widths = allocate(view, view.total_bytes // 2)
    used = view.cost_bytes[np.arange(48), view.index(widths)].sum()
    assert 0.98 * view.total_bytes // 2 <= used <= view.total_bytes // 2
    least = int(view.cost_bytes[:, 0].sum())
    with pytest.raises(BudgetError, match=rf"\({least:,} bytes\) .* \({least - 1:,} bytes\)"):
        allocate(view, least - 1)


def test_nothing_to_do_is_an_empty_plan():
    view = state([[0, 1]], [[1, 0]])
    for method in ("hull", "greedy"):
        found = plan(view, 0, method=method)
        assert (found.moves, found.satisfied) == ((), True)
    assert plan_reload(view, -5).moves == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"damage": np.array([[np.nan, 0.0]])}, "finite"),
        ({"damage": np.array([[np.inf, 0.0]])}, "finite"),
        ({"cost_bytes": np.array([[2, 1]])}, "fall"),
        ({"bits": np.array([7])}, "among the widths"),
        ({"floors": np.array([2, 2])}, "disagree"),
    ],
)
def test_a_state_that_makes_no_sense_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(state([[0, 1]], [[1, 0]]), **change)


def test_same_state_same_plan():
    view = qwen_like(blocks=480)
    again = qwen_like(blocks=480)
    target = view.total_bytes // 7
    assert plan(view, target).moves == plan(again, target).moves
