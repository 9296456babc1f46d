import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pw.planning.planner import allocate
from pw.planning.rebalance import rebalance
from support.planning import PAGE, levelled, qwen_like, states

ALL = 1 << 50


def damage_at(view, bits):
    return levelled(view)[np.arange(len(bits)), view.index(bits)].sum()


def exact_gain(view, after):
    """Damage that widths `after` undo, rounded once: a sum over all blocks may swallow it."""
    damage, blocks = levelled(view), np.arange(len(after))
    before = damage[blocks, view.index(view.bits)]
    return math.fsum([*before, *-damage[blocks, view.index(after)]])


def shifted(seed):
    """Blocks allocated well for yesterday's damages, seen with today's."""
    yesterday, today = qwen_like(blocks=96, seed=1), qwen_like(blocks=96, seed=seed)
    bits = allocate(yesterday, yesterday.total_bytes // 2)
    return replace(today, bits=bits)


def apply(view, trade):
    return replace(view, bits=trade.up.apply(trade.down.apply(view.bits)))


def test_trades_reach_the_best_allocation_of_the_same_bytes():
    view = shifted(seed=2)
    held = view.total_bytes
    best = damage_at(view, allocate(view, held))
    start = damage_at(view, view.bits)
    for _ in range(40):
        trade = rebalance(view, 1 << 24, least_gain=0.0)
        if trade is None:
            break
        assert trade.up.bytes <= 1 << 24
        view = apply(view, trade)
        assert view.total_bytes <= held
    assert trade is None  # trades end: they do not chase each other
    assert best <= damage_at(view, view.bits) <= 1.05 * best
    assert start > 1.5 * best


def test_a_good_allocation_is_left_alone():
    view = qwen_like(blocks=96)
    view = replace(view, bits=allocate(view, view.total_bytes // 2))
    assert rebalance(view, ALL) is None


def test_small_gains_are_left_alone():
    view = shifted(seed=2)
    trade = rebalance(view, ALL, least_gain=0.0)
    share = trade.gain / damage_at(view, view.bits)
    assert rebalance(view, ALL, least_gain=0.99 * share) is not None
    assert rebalance(view, ALL, least_gain=1.01 * share) is None


def test_an_expert_that_became_hot_is_raised_within_one_trade_each_block():
    view = qwen_like(blocks=96)
    bits = allocate(view, view.total_bytes // 2)
    narrow = int(np.flatnonzero(bits == 3)[0])
    floors = view.floors.copy()
    floors[narrow] = 5
    view = replace(view, bits=bits, floors=floors)
    trade = rebalance(view, ALL)
    assert apply(view, trade).bits[narrow] >= 5
    assert trade.down.bytes >= trade.up.bytes


def test_spare_bytes_pay_too():
    view = shifted(seed=2)
    trade = rebalance(view, ALL, spare_bytes=1 << 26, least_gain=0.0)
    assert 0 < trade.up.bytes - trade.down.bytes <= 1 << 26


def test_nothing_moves_without_transfer():
    assert rebalance(shifted(seed=2), 0, least_gain=0.0) is None


@settings(max_examples=100, deadline=None)
@given(states(), st.integers(0, 40), st.integers(0, 8))
def test_a_trade_pays_for_itself_and_moves_each_block_once(view, transfer, spare):
    trade = rebalance(view, transfer * PAGE, spare * PAGE, least_gain=0.0)
    if trade is None:
        return
    assert trade.up.bytes <= transfer * PAGE
    assert trade.down.bytes + spare * PAGE >= trade.up.bytes
    assert not set(trade.up.block.tolist()) & set(trade.down.block.tolist())
    hot = (view.bits < np.minimum(view.floors, view.ceil)).any()
    after = apply(view, trade).bits
    undone = exact_gain(view, after)
    assert hot or trade.gain > 0
    assert hot or undone > 0
    assert trade.gain == pytest.approx(undone, rel=1e-9, abs=1e-14 * damage_at(view, view.bits))
    assert (after >= np.minimum(view.floors, view.bits)).all()
    assert (after <= np.maximum(view.ceil, view.bits)).all()
