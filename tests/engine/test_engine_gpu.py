"""The same engine on a GPU: log-probabilities of the CPU, planes moving on their own stream."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from pw.engine.request import Grammar, SamplingParams
from support.engines import make_artifact, open_engine, random_prompt, tight_budget
from support.logprobs import prompt_values

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SCORE = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=0)


@pytest.mark.parametrize("kind", ["qwen2_moe", "mixtral", "gemma4_text"])
@pytest.mark.parametrize("policy", ["static:2", "static:4", "static:6", "dense"])
def test_log_probabilities_equal_the_cpu(kind: str, policy: str, tmp_path: Path) -> None:
    _, artifact = make_artifact(kind, tmp_path)
    prompts = [random_prompt(length, length) for length in (70, 3, 41, 1)]
    on_cpu = open_engine(artifact, policy).generate(prompts, SCORE)
    on_gpu = open_engine(artifact, policy, device="cuda", dtype="float32")
    for mine, expected in zip(on_gpu.generate(prompts, SCORE), on_cpu, strict=True):
        got, wanted = (torch.tensor(prompt_values(c)) for c in (mine, expected))
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)
    on_gpu.check_integrity()


def test_what_changes_logits_does_the_same_on_the_gpu(tmp_path: Path) -> None:
    _, artifact = make_artifact("qwen2_moe", tmp_path, num_attention_heads=2)
    settings = {"max_tokens": 30, "temperature": 0}
    params = [
        SamplingParams(**settings, frequency_penalty=0.7, repetition_penalty=1.2),
        SamplingParams(**settings, logit_bias=((9, 5.0), (70, -100.0)), min_tokens=20),
        SamplingParams(**settings),
    ]
    if find_spec("xgrammar") is not None:
        params.append(SamplingParams(**settings, grammar=Grammar("regex", "[a-f]{20}")))
    prompts = [random_prompt(11 + seed, seed) for seed in range(len(params))]
    on_cpu = open_engine(artifact, "static:4").generate(prompts, params)
    on_gpu = open_engine(artifact, "static:4", device="cuda", dtype="float32")
    for mine, expected in zip(on_gpu.generate(prompts, params), on_cpu, strict=True):
        assert mine.token_ids == expected.token_ids


def test_planes_move_on_a_stream_of_their_own_and_come_back_bit_exact(tmp_path: Path) -> None:
    _, artifact = make_artifact("qwen2_moe", tmp_path, num_attention_heads=2)
    where: dict[str, Any] = {"device": "cuda", "dtype": "float32"}
    budget = tight_budget(artifact, kv_tokens=80, **where)
    engine = open_engine(artifact, memory_budget=budget, planner_low_watermark=0.01, **where)

    def settle() -> None:
        quiet = 0
        while quiet < 40:
            quiet = 0 if engine.idle_turn() else quiet + 1
        torch.cuda.synchronize()
        engine.check_integrity()

    settle()
    before = engine.generate([random_prompt(30, 1)], SCORE)
    for cycle in range(10):
        prompts = [random_prompt(150, 10 * cycle + i) for i in range(7)]
        for number, prompt in enumerate(prompts):
            engine.add_request(
                f"{cycle}-{number}", prompt, SamplingParams(temperature=0, max_tokens=8)
            )
        lowest = engine.status().mean_bits
        while engine.has_work():
            engine.step()
            engine.check_integrity()
            lowest = min(lowest, engine.status().mean_bits)
        assert lowest < 5.5
        settle()
        assert engine.status().mean_bits == 6
    assert engine.status().bytes_reloaded > 0
    assert engine.generate([random_prompt(30, 1)], SCORE) == before


def test_steady_state_allocates_nothing_beyond_the_plan(tmp_path: Path) -> None:
    _, artifact = make_artifact("qwen2_moe", tmp_path, num_attention_heads=2)
    engine = open_engine(artifact, "static:4", device="cuda", dtype="float32")
    prompts = [random_prompt(100, seed) for seed in range(6)]
    engine.generate(prompts, SCORE)
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    engine.generate(prompts, SCORE)
    peak = torch.cuda.max_memory_allocated() - start
    assert peak <= engine.status().bytes.workspace
    assert torch.cuda.memory_allocated() == start
