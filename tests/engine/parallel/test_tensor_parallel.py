"""Two ranks that share a model give the tokens of one. Most of it with followers as threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pw.blocks import BlockShape, ExpertGeometry
from pw.engine import Completion, Engine
from pw.engine.parallel.share import check_even
from pw.engine.request import SamplingParams
from pw.errors import BudgetError, ConfigError
from support.engines import make_artifact, open_engine, random_prompt
from support.ranks import FollowerThread, threads

__all__ = ["threads"]

LENGTHS = (57, 3, 33, 1)
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, prompt_logprobs=0)
SAMPLED = SamplingParams(temperature=0.8, seed=3, max_tokens=10, ignore_eos=True)
TWO: dict[str, Any] = {"tensor_parallel_size": 2, "collective_timeout": 240.0}


def answers(engine: Engine) -> list[Completion]:
    """Prompts in chunks beside decoding sequences, greedy and sampled."""
    prompts = [random_prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    done = engine.generate(prompts, [GREEDY, SAMPLED] * 2)
    engine.check_integrity()
    assert engine.status().pages_kv == 0
    return done


def check_same(found: list[Completion], expected: list[Completion]) -> None:
    for one, two in zip(expected, found, strict=True):
        assert one.token_ids == two.token_ids
        for a, b in zip(one.prompt_logprobs, two.prompt_logprobs, strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                assert a.logprob == pytest.approx(b.logprob, abs=2e-4)


def test_two_processes_give_the_tokens_of_one(qwen: tuple[Any, Path]) -> None:
    expected = answers(open_engine(qwen[1], "static:4"))
    engine = open_engine(qwen[1], "static:4", **TWO)
    assert torch.get_num_threads() == 1  # the cores are shared; both ranks plan the same memory
    team = engine._parts.team
    assert team is not None
    try:
        check_same(answers(engine), expected)
    finally:
        engine.close()
    assert team.followers[0].how_it_ended() is not None


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_two_ranks_give_the_tokens_of_one(
    kind: str, tmp_path: Path, threads: list[FollowerThread]
) -> None:
    _, artifact = make_artifact(kind, tmp_path)
    for policy in ("static:3", "dense"):
        expected = answers(open_engine(artifact, policy))
        engine = open_engine(artifact, policy, **TWO)
        check_same(answers(engine), expected)
        engine.close()
    assert [thread.returncode for thread in threads] == [0, 0]


def test_ranks_with_the_same_kv_head_give_the_tokens_of_one(
    tmp_path: Path, threads: list[FollowerThread]
) -> None:
    """Gemma 4: two KV heads in sliding layers, one in the others, which both ranks store."""
    _, artifact = make_artifact("gemma4_text", tmp_path, moe_intermediate_size=12)
    expected = answers(open_engine(artifact, "static:3"))
    engine = open_engine(artifact, "static:3", **TWO)
    check_same(answers(engine), expected)
    engine.close()


def test_experts_by_rank_give_the_tokens_of_one_rank(
    qwen: tuple[Any, Path], threads: list[FollowerThread]
) -> None:
    for policy in ("static:4", "dense"):
        expected = answers(open_engine(qwen[1], policy))
        engine = open_engine(qwen[1], policy, enable_expert_parallel=True, **TWO)
        check_same(answers(engine), expected)
        engine.close()


def test_kernels_know_how_many_experts_all_ranks_have(
    qwen: tuple[Any, Path], threads: list[FollowerThread]
) -> None:
    """Slots of a call are spread over them: which kernel is the fastest goes by that."""
    for by_expert, own in ((False, 6), (True, 3)):
        engine = open_engine(qwen[1], "static:3", enable_expert_parallel=by_expert, **TWO)
        experts: Any = engine._parts.runner._experts
        paged = experts._inner if by_expert else experts
        assert {pages.spread for layer in paged._pages for pages in layer} == {6}
        assert {pages.experts for layer in paged._pages for pages in layer} == {own}
        engine.close()


def test_what_cannot_be_shared_is_refused_and_nothing_is_left(
    qwen: tuple[Any, Path], threads: list[FollowerThread]
) -> None:
    with pytest.raises(ConfigError, match="2 attention heads cannot be shared evenly by 3 ranks"):
        open_engine(qwen[1], "static:3", tensor_parallel_size=3)
    with pytest.raises(BudgetError, match="are the least"):
        open_engine(qwen[1], "static:3", memory_budget=100_000, **TWO)
    for thread in threads:
        assert not thread._thread.is_alive()


def test_settings_that_make_no_sense_together_are_refused(qwen: tuple[Any, Path]) -> None:
    with pytest.raises(ConfigError, match="enable_expert_parallel needs several ranks"):
        open_engine(qwen[1], enable_expert_parallel=True)
    with pytest.raises(ConfigError, match="residual exact needs all of an expert on one rank: 2"):
        open_engine(qwen[1], planner_residual="exact", **TWO)
    with pytest.raises(ConfigError, match=r"2 experts share one: `static:bits\.json`"):
        open_engine(qwen[1], "static:bits.json", enable_expert_parallel=True, **TWO)
    with pytest.raises(ConfigError, match="tensor_parallel_size must be at least 1: 0"):
        open_engine(qwen[1], tensor_parallel_size=0)
    with pytest.raises(ConfigError, match=r"collective_timeout must be positive: 0\.0"):
        open_engine(qwen[1], collective_timeout=0.0)


@pytest.mark.parametrize(
    ("inner", "experts", "size", "by_expert", "text", "hint"),
    [
        (24, 8, 16, False, "24 inner columns of each expert", "1, 2, 3, 4, 6, 8 or 12"),
        (24, 60, 5, False, "24 inner columns", "8 or 12, or give --enable-expert-parallel"),
        (24, 60, 8, True, "60 routed experts", "or leave --enable-expert-parallel out"),
        (24, 61, 7, True, "61 routed experts", "use --tensor-parallel-size 1"),
    ],
)
def test_hints_name_numbers_of_ranks_that_would_do(
    inner: int, experts: int, size: int, by_expert: bool, text: str, hint: str
) -> None:
    shapes = (BlockShape(2 * inner, 32), BlockShape(32, inner))
    geometry = ExpertGeometry((0,), experts, 2, *shapes)
    with pytest.raises(ConfigError, match=text) as refused:
        check_even(geometry, size, by_expert=by_expert)
    assert refused.value.hint.endswith(hint)
