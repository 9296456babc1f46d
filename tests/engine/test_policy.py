"""Policies switched while the engine runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pw.engine import Engine
from pw.engine.request import SamplingParams
from pw.errors import RequestError
from support.engines import open_engine, random_prompt, tight_budget

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def artifact(qwen: tuple[Any, Path]) -> Path:
    return qwen[1]


def widths(engine: Engine) -> set[int]:
    return set(engine.status().blocks_by_bits)


def settle(engine: Engine) -> None:
    """Idle turns until nothing moves any more."""
    for _ in range(2000):
        if not engine.idle_turn():
            return
        engine.check_integrity()
    pytest.fail("planes never stop moving")


def texts(engine: Engine) -> list[tuple[int, ...]]:
    prompts = [random_prompt(20, seed) for seed in range(3)]
    return [each.token_ids for each in engine.generate(prompts, GREEDY)]


def test_a_width_switched_to_is_that_width_bit_for_bit(artifact: Path) -> None:
    engine = open_engine(artifact)
    assert widths(engine) == {6}
    engine.set_policy("static:3")
    assert widths(engine) == {3}  # at once: falling needs no copy
    engine.check_integrity()
    assert engine.status().policy == "static:3"
    assert texts(engine) == texts(open_engine(artifact, "static:3"))
    settle(engine)
    assert widths(engine) == {3}  # idle turns bring nothing back

    engine.set_policy("static:5")
    settle(engine)
    assert widths(engine) == {5}
    assert texts(engine) == texts(open_engine(artifact, "static:5"))

    engine.set_policy("adaptive")
    settle(engine)
    assert widths(engine) == {6}
    assert engine.status().policy == "adaptive"
    assert texts(engine) == texts(open_engine(artifact, "static:6"))


def test_raises_under_way_are_taken_back(artifact: Path) -> None:
    engine = open_engine(artifact)
    engine.set_policy("static:2")
    engine.set_policy("adaptive")
    engine.idle_turn()
    assert engine.status().moves_in_flight > 0
    engine.set_policy("static:2")
    engine.check_integrity()
    assert widths(engine) == {2}
    settle(engine)
    assert widths(engine) == {2}


def test_requests_go_on_through_a_switch(artifact: Path) -> None:
    engine = open_engine(artifact)
    engine.add_request("r", random_prompt(20, 1), SamplingParams(max_tokens=40, ignore_eos=True))
    bits = []
    while engine.has_work():
        for output in engine.step():
            bits.append(output.mean_bits)
            if len(bits) in (5, 20):
                engine.set_policy("static:2" if len(bits) == 5 else "adaptive")
    assert len(bits) == 40
    assert bits[4] == 6
    assert bits[10] == 2
    assert bits[-1] > 2
    assert engine.status().pages_kv == 0


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("static:8", "between 2 and 6: 8"),
        ("static:9", "static width must be 2 to 8"),
        ("dense", "not a policy for an engine that runs: `dense`"),
        ("static:bits.json", "not a policy for an engine that runs"),
        ("replay:trace.jsonl", "not a policy for an engine that runs"),
        ("fast", "unknown precision policy: `fast`"),
    ],
)
def test_what_cannot_be_followed_changes_nothing(artifact: Path, policy: str, message: str) -> None:
    engine = open_engine(artifact)
    with pytest.raises(RequestError, match=message) as refused:
        engine.set_policy(policy)
    assert (refused.value.status, refused.value.param) == (400, "policy")
    assert engine.status().policy == "adaptive"
    assert widths(engine) == {6}


def test_a_width_that_would_break_the_promised_context_is_refused(artifact: Path) -> None:
    budget = tight_budget(artifact, kv_tokens=40)
    engine = open_engine(artifact, memory_budget=budget)
    with pytest.raises(RequestError, match=r"all blocks at 6 bits leave \d+ pages for KV"):
        engine.set_policy("static:6")
    engine.set_policy("static:3")
    assert widths(engine) == {3}


def test_a_static_engine_stays_what_it_is(artifact: Path) -> None:
    engine = open_engine(artifact, "static:3")
    with pytest.raises(RequestError, match="started with the policy static:3") as refused:
        engine.set_policy("static:4")
    assert "--precision-policy adaptive" in refused.value.hint


@pytest.mark.parametrize(
    ("policy", "settings", "widths"),
    [("static:3", {}, (3, 3)), ("adaptive", {}, (2, 6)), ("adaptive", {"max_bits": 4}, (2, 4))],
)
def test_kernels_know_which_widths_a_policy_can_reach(
    qwen: tuple[Any, Path], policy: str, settings: dict[str, Any], widths: tuple[int, int]
) -> None:
    experts: Any = open_engine(qwen[1], policy, **settings)._parts.runner._experts
    assert {pages.widths for pair in experts._pages for pages in pair} == {widths}
