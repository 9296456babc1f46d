"""Real steps never allocate more than the plan set aside for them."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile

from pw.config import EngineConfig
from pw.engine import Engine
from pw.engine.request import Grammar, SamplingParams
from pw.errors import ConfigError
from support.engines import make_artifact, open_engine, random_prompt

EVERYTHING = SamplingParams(
    temperature=1.0,
    top_p=0.9,
    top_k=20,
    seed=1,
    max_tokens=5,
    ignore_eos=True,
    prompt_logprobs=5,
    logprobs=5,
    min_tokens=2,
    repetition_penalty=1.1,
    frequency_penalty=0.1,
    logit_bias=tuple((token, 1.0) for token in range(100)),
    grammar=Grammar("regex", "[a-z]+"),
)


def peak_bytes(engine: Engine) -> int:
    """Most bytes alive at once that one step allocated, in torch and outside it.

    0 of a step that computed nothing, since grammars were still being compiled.
    """
    steps = engine.status().step
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        engine.step()
    elsewhere = tracemalloc.get_traced_memory()[1] - before  # numpy, for the most part
    tracemalloc.stop()
    results = profiler.profiler.kineto_results.events()
    events = sorted((e.start_ns(), e.nbytes()) for e in results if e.name() == "[memory]")
    if engine.status().step == steps:
        return 0
    assert events
    live = peak = 0
    for _, size in events:
        live += size
        peak = max(peak, live)
    return peak + elsewhere


def worst(engine: Engine, prompt: int) -> int:
    """The worst step of a full engine, prefill and decode."""
    engine.generate([random_prompt(20, 0)], EVERYTHING)  # whatever is made once is made
    for seed in range(8):
        engine.add_request(f"r{seed}", random_prompt(prompt, seed), EVERYTHING)
    peaks = []
    while engine.has_work():
        peaks.append(peak_bytes(engine))
    assert sum(map(bool, peaks)) >= EVERYTHING.max_tokens  # one token a step, at most
    return max(peaks)


@pytest.mark.parametrize(
    ("policy", "tokens", "settings"),
    [
        ("adaptive", 32, {}),
        ("adaptive", 256, {"planner_residual": "exact"}),
        ("static:4", 256, {}),
        ("static:4", 2048, {"max_model_len": 105}),  # of 8 sequences, 840 tokens
        ("dense", 256, {}),
    ],
)
def test_steps_stay_within_their_workspace(
    qwen: tuple[Any, Path], policy: str, tokens: int, settings: dict[str, Any]
) -> None:
    engine = open_engine(qwen[1], policy, max_num_batched_tokens=tokens, **settings)
    planned = engine.status().bytes.workspace
    measured = worst(engine, 100)
    assert measured <= planned
    assert planned < 8 * measured  # generous, not absurd


def test_layers_of_another_kind_stay_within_it_too(tmp_path: Path) -> None:
    _, artifact = make_artifact("gemma4_shared", tmp_path)
    engine = open_engine(artifact, "static:4", max_num_batched_tokens=128)
    assert worst(engine, 60) <= engine.status().bytes.workspace


def test_steps_have_more_tokens_on_a_gpu_unless_their_number_is_given() -> None:
    assert (EngineConfig().step_tokens("cuda"), EngineConfig().step_tokens("cpu")) == (2048, 512)
    given = EngineConfig(max_num_batched_tokens=64)
    assert given.step_tokens("cuda") == given.step_tokens("cpu") == 64
    with pytest.raises(ConfigError, match="must be at least 1"):
        EngineConfig(max_num_batched_tokens=0)
