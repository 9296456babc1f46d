"""States for the planner's tests, random and real, and answers by exhaustion."""

import itertools

import numpy as np
from hypothesis import strategies as st

from pw.planning.planner import PlannerState

PAGE = 4096


@st.composite
def states(draw, max_blocks=5, widths=4):
    """Any state the planner accepts: steps of zero bytes or zero damage, equal prices, concave
    costs, damage that rises with width, blocks below their floor.
    """
    n = draw(st.integers(1, max_blocks))
    W = draw(st.integers(1, widths))
    first = draw(st.integers(2, 3))
    names = np.arange(first, first + W)

    def table(elements):
        row = st.lists(elements, min_size=W, max_size=W)
        return np.array(draw(st.lists(row, min_size=n, max_size=n)))

    def column():
        return names[np.array(draw(st.lists(st.integers(0, W - 1), min_size=n, max_size=n)))]

    cost = np.cumsum(table(st.integers(0, 4)), axis=1) * PAGE
    damage = table(st.one_of(st.integers(0, 5).map(float), st.floats(0, 1e3)))
    bits, ceil = column(), column()
    return PlannerState(names, bits, column(), np.maximum(bits, ceil), cost, damage)


def levelled(state):
    """Damage [n, W] as the planner reads it: never rising with width."""
    return np.maximum.accumulate(state.damage[:, ::-1], axis=1)[:, ::-1]


def outcomes(state):
    """Every choice of widths between floor and committed bits: (bytes released, damage added)."""
    index, floor = state.index(state.bits), state.index(np.minimum(state.floors, state.bits))
    damage = levelled(state)
    choices = [range(low, now + 1) for low, now in zip(floor, index, strict=True)]
    rows = np.arange(len(index))
    for choice in itertools.product(*choices):
        to = np.array(choice)
        released = state.cost_bytes[rows, index] - state.cost_bytes[rows, to]
        yield int(released.sum()), float((damage[rows, to] - damage[rows, index]).sum())


def qwen_like(blocks=2880, widths=6, seed=0, layer_floor=0.0):
    """Blocks with the bytes of Qwen1.5-MoE-A2.7B at 3 to 8 bits and damages over four decades."""
    random = np.random.default_rng(seed)
    names = np.arange(3, 3 + widths)
    gate_up = np.arange(blocks) % 2 == 0
    planes = np.where(gate_up, 704, 352)[:, None] * 1024 * names
    luts = np.where(gate_up, 2816, 2048)[:, None] * 2**names * 2
    cost = (planes + luts + 32767) // 32768 * 32768
    scale = np.exp(random.normal(0, 2, (blocks, 1)))
    damage = scale * 4.0 ** (3 - names) * np.exp(random.normal(0, 0.3, (blocks, widths)))
    top = np.full(blocks, names[-1])
    return PlannerState(
        names,
        top,
        np.full(blocks, 3),
        top,
        cost,
        np.maximum(damage - damage[:, -1:], 0),
        np.arange(blocks) * 24 // blocks,
        layer_floor,
    )
