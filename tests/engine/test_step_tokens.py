"""Tokens of a step that nobody has given: as many as the budget allows, and charged as such."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from pw.config import EngineConfig, PrecisionPolicy
from pw.engine.request import SamplingParams
from pw.engine.start import demand as demand_module
from pw.engine.start.demand import demand_of
from pw.engine.start.sources import Loaded, load
from pw.engine.start.steps import settle_steps, step_sizes
from pw.errors import BudgetError
from pw.memory.budget import MemoryPlan, plan_memory
from pw.models.geometry import KvGeometry
from support.engines import make_artifact, open_engine, random_prompt

CONFIG = EngineConfig(policy=PrecisionPolicy.parse("static:3"))


@pytest.fixture
def loaded(qwen: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> Loaded:
    """A model as if on a GPU: nothing is computed on it."""
    monkeypatch.setattr(demand_module, "attention_scratch_bytes", lambda *_, **__: 0)
    its = load(qwen[1], CONFIG, torch.device("cpu"))
    skeleton = dataclasses.replace(its.skeleton, device=torch.device("cuda"))
    return dataclasses.replace(its, skeleton=skeleton)


def plan_of(loaded: Loaded, config: EngineConfig, tokens: int, budget: int) -> MemoryPlan:
    """How a budget is divided with so many tokens in a step."""
    given = dataclasses.replace(config, max_num_batched_tokens=tokens)
    return plan_memory(budget, demand_of(loaded.source, loaded.skeleton, given, None))


def least_budget(loaded: Loaded, config: EngineConfig, tokens: int) -> int:
    """Least bytes with which a sequence of the full length fits."""
    low, high = 0, 1 << 34
    while high - low > 1:
        middle = (low + high) // 2
        try:
            length = plan_of(loaded, config, tokens, middle).max_model_len
        except BudgetError:
            length = 0
        low, high = (low, middle) if length == full_length(loaded, config) else (middle, high)
    return high


def full_length(loaded: Loaded, config: EngineConfig) -> int:
    """Tokens that the model, or the user, states as the limit."""
    return config.max_model_len or loaded.skeleton.max_model_len


def test_steps_that_cannot_be_long_are_not_charged_for_more(loaded: Loaded) -> None:
    small = dataclasses.replace(CONFIG, max_num_seqs=1, max_model_len=64)
    assert least_budget(loaded, small, 2048) == least_budget(loaded, small, 64)
    assert least_budget(loaded, small, 64) > least_budget(loaded, small, 63)
    several = dataclasses.replace(small, max_num_seqs=3)
    assert least_budget(loaded, several, 2048) == least_budget(loaded, several, 192)
    assert least_budget(loaded, several, 192) > least_budget(loaded, several, 191)


def test_a_budget_that_held_shorter_steps_holds_them_again(
    loaded: Loaded, caplog: pytest.LogCaptureFixture
) -> None:
    budgets = {tokens: least_budget(loaded, CONFIG, tokens) for tokens in (2048, 1024, 512)}
    assert budgets[2048] > budgets[1024] > budgets[512]
    with caplog.at_level(logging.INFO):
        for wanted, budget in budgets.items():
            config, demand, memory = settle_steps(loaded, CONFIG, budget)
            assert config.max_num_batched_tokens == demand.chunk_tokens == wanted
            assert memory == plan_of(loaded, CONFIG, wanted, budget)
            assert memory.max_model_len == loaded.skeleton.max_model_len
    assert [message.partition(",")[0] for message in caplog.messages] == [
        "steps of up to 1024 tokens",
        "steps of up to 512 tokens",
    ]


def test_where_no_steps_leave_room_for_the_full_length_the_context_is_the_longest(
    loaded: Loaded,
) -> None:
    budget = least_budget(loaded, CONFIG, 512) - 1
    config, _, memory = settle_steps(loaded, CONFIG, budget)
    assert config.max_num_batched_tokens == 512
    assert memory.max_model_len == plan_of(loaded, CONFIG, 512, budget).max_model_len
    with pytest.raises(BudgetError, match="are the least"):
        settle_steps(loaded, CONFIG, 1000)


@pytest.mark.parametrize(
    ("windows", "sizes"),
    [
        ((None, None), [2048, 1024, 512]),
        ((4096, None), [2048, 1024, 512]),
        ((1024, None), [1024, 512]),
        ((700, 1024), [700, 512]),
        ((128, None), [512]),
    ],
)
def test_steps_are_no_longer_than_the_shortest_window(
    loaded: Loaded, windows: tuple[int | None, ...], sizes: list[int]
) -> None:
    layers = [
        dataclasses.replace(layer, window=window)
        for layer, window in zip(loaded.skeleton.kv.layers, windows, strict=False)
    ]
    skeleton = dataclasses.replace(loaded.skeleton, kv=KvGeometry(tuple(layers)))
    its = dataclasses.replace(loaded, skeleton=skeleton)
    assert step_sizes(its, CONFIG) == sizes
    given = dataclasses.replace(CONFIG, max_num_batched_tokens=2048)
    assert step_sizes(its, given) == [2048]
    on_cpu = dataclasses.replace(skeleton, device=torch.device("cpu"))
    assert step_sizes(dataclasses.replace(its, skeleton=on_cpu), CONFIG) == [512]


def test_a_given_number_of_tokens_stays(loaded: Loaded, caplog: pytest.LogCaptureFixture) -> None:
    given = dataclasses.replace(CONFIG, max_num_batched_tokens=2048)
    budget = least_budget(loaded, CONFIG, 1024)
    with caplog.at_level(logging.INFO):
        config, _, memory = settle_steps(loaded, given, budget)
    assert config == given
    assert memory.max_model_len < loaded.skeleton.max_model_len
    assert caplog.messages == []


def test_an_engine_rehearses_no_longer_steps_than_it_can_have(tmp_path: Path) -> None:
    _, artifact = make_artifact("qwen2_moe", tmp_path)
    engine = open_engine(
        artifact, "static:4", max_num_seqs=2, max_model_len=48, max_num_batched_tokens=512
    )
    assert engine._parts.kv.chunk_tokens == 96
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    outputs = engine.generate([random_prompt(40, seed) for seed in range(2)], params)
    assert all(output.error is None for output in outputs)
    engine.check_integrity()
