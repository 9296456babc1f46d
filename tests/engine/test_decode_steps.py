"""Decode steps of fixed shape beside packed ones: same tokens, same log-probabilities.

On a CPU the steps run by calls, in the shape in which a GPU replays them: padded to a bucket, all
inputs at fixed addresses, block tables followed by copies.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from pw.engine import Engine
from pw.engine.graphs.capture import Step, eager
from pw.engine.graphs.decode import DecodeSteps, bucket_sizes
from pw.engine.request import SamplingParams
from support.engines import make_artifact, open_engine, random_prompt

LENGTHS = (45, 1, 17, 30, 2, 64, 9)


def with_steps(engine: Engine, make: Callable[[Step], Step] = eager, most: int = 8) -> list[int]:
    """Let an engine decode in fixed shapes; the batch sizes that went through them, as they do."""
    runner = engine._parts.runner
    runner.steps = DecodeSteps(runner._skeleton, runner._experts, engine._parts.kv, most, make)
    run, sizes = runner.steps.run, []

    def watched(chunks: Any, experts: Any) -> Tensor:
        sizes.append(len(chunks))
        return run(chunks, experts)

    runner.steps.run = watched  # type: ignore[method-assign]
    return sizes


def requests(count: int = len(LENGTHS)) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of many lengths, greedy and sampled, that end at different times."""
    params = [
        SamplingParams(
            temperature=0.0 if seed % 2 else 0.8,
            top_p=0.9 if seed % 3 else 1.0,
            seed=seed,
            max_tokens=6 + 5 * (seed % 4),
            ignore_eos=True,
            logprobs=2,
            frequency_penalty=0.5 if seed == 3 else 0.0,
        )
        for seed in range(count)
    ]
    return [random_prompt(LENGTHS[seed % 7], seed) for seed in range(count)], params


def assert_same(found: Any, expected: Any, *, exact: bool) -> None:
    """The same tokens and texts; log-probabilities equal to the bit, or to rounding."""
    for mine, its in zip(found, expected, strict=True):
        assert (mine.token_ids, mine.finish_reason) == (its.token_ids, its.finish_reason)
        got, wanted = ([entry.logprob for entry in done.logprobs] for done in (mine, its))
        if exact:
            assert got == wanted
        else:
            assert got == pytest.approx(wanted, abs=2e-5)


def test_buckets_are_powers_of_two_and_the_most() -> None:
    assert bucket_sizes(1) == [1]
    assert bucket_sizes(8) == [1, 2, 4, 8]
    assert bucket_sizes(50) == [1, 2, 4, 8, 16, 32, 50]


@pytest.mark.parametrize(
    "kind",
    [
        "qwen2_moe",
        "qwen2_moe_window",
        "mixtral",
        "gemma4_text",
        "gemma4_shared",
        "qwen3_moe",
        "gpt_oss",
        "deepseek_v2",
    ],
)
def test_every_architecture_decodes_in_fixed_shapes(kind: str, tmp_path: Path) -> None:
    _, artifact = make_artifact(kind, tmp_path)
    prompts, params = requests()
    expected = open_engine(artifact, "static:4").generate(prompts, params)
    engine = open_engine(artifact, "static:4")
    sizes = with_steps(engine)
    assert_same(engine.generate(prompts, params), expected, exact=False)
    assert {1, 3, 5, 7} & set(sizes) and max(sizes) > 4  # noqa: PT018  padded ones among them
    engine.check_integrity()
