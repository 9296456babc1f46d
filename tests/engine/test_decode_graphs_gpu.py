"""Decode steps replayed from CUDA graphs: the tokens of steps by calls, no waits, no bytes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pw.config import EngineConfig, PrecisionPolicy
from pw.engine import Engine
from pw.engine.request import SamplingParams
from pw.models.stand_in import write_folder
from support.device import no_waits
from support.engines import make_artifact, open_engine, random_prompt, tight_budget
from support.overlap import WIDTHS, launches, serve_at_changing_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WHERE: dict[str, Any] = {"device": "cuda", "dtype": "float32"}
LENGTHS = (45, 1, 17, 30, 2, 64, 9)


def requests(count: int = 7) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of many lengths, greedy and sampled, that end at different times."""
    params = [
        SamplingParams(
            temperature=0.0 if seed % 2 else 0.8,
            top_p=0.9 if seed % 3 else 1.0,
            seed=seed,
            max_tokens=6 + 5 * (seed % 4),
            ignore_eos=True,
            logprobs=2,
        )
        for seed in range(count)
    ]
    return [random_prompt(LENGTHS[seed % 7], seed) for seed in range(count)], params


def assert_same(found: Any, expected: Any) -> None:
    for mine, its in zip(found, expected, strict=True):
        assert (mine.token_ids, mine.error) == (its.token_ids, its.error)
        got, wanted = ([entry.logprob for entry in done.logprobs] for done in (mine, its))
        assert got == pytest.approx(wanted, abs=2e-4)


def captured(artifact: Path, policy: str = "adaptive", **settings: Any) -> Engine:
    engine = open_engine(artifact, policy, **(WHERE | settings))
    assert engine._parts.runner.steps is not None
    return engine


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        ("qwen2_moe", "static:4"),  # in fp32 low bits take half a minute to compile, for each shape
        *((kind, "dense") for kind in (
            "qwen2_moe_window", "mixtral", "gemma4_text", "gemma4_shared", "qwen3_moe", "olmoe",
            "granitemoe", "glm4_moe", "deepseek_v2", "deepseek_v3",
        )),
    ],
)  # fmt: skip
def test_every_architecture_is_captured_and_agrees(kind: str, policy: str, tmp_path: Path) -> None:
    _, artifact = make_artifact(kind, tmp_path)
    prompts, params = requests()
    eager = open_engine(artifact, policy, enforce_eager=True, **WHERE)
    assert eager._parts.runner.steps is None
    engine = captured(artifact, policy)
    assert_same(engine.generate(prompts, params), eager.generate(prompts, params))
    engine.check_integrity()


def test_what_cannot_be_captured_is_served_by_calls(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """gpt_oss has an activation of its own, which only the reference kernel takes."""
    _, artifact = make_artifact("gpt_oss", tmp_path)
    prompts, params = requests()
    with caplog.at_level("WARNING"):
        engine = open_engine(artifact, "static:4", **WHERE)
    assert engine._parts.runner.steps is None
    assert sum("decode runs without CUDA graphs" in message for message in caplog.messages) == 1
    eager = open_engine(artifact, "static:4", enforce_eager=True, **WHERE)
    assert_same(engine.generate(prompts, params), eager.generate(prompts, params))


def test_sampled_tokens_are_those_of_the_cpu(qwen: tuple[Any, Path]) -> None:
    prompts, params = requests()
    on_cpu = open_engine(qwen[1], "static:4").generate(prompts, params)
    assert_same(captured(qwen[1], "static:4").generate(prompts, params), on_cpu)


def test_a_graph_stays_right_while_bits_change(qwen: tuple[Any, Path]) -> None:
    prompts, params = requests()
    graphs, calls = (
        open_engine(
            qwen[1], enforce_eager=eager, enable_prefix_caching=False, async_scheduling=False,
            **WHERE,
        )
        for eager in (False, True)
    )  # fmt: skip
    assert graphs._parts.runner.steps is not None
    found = serve_at_changing_bits(graphs, prompts, params)
    assert found == serve_at_changing_bits(calls, prompts, params)
    assert set(found[1]) == set(WIDTHS)


def test_steps_that_overlap_give_the_tokens_of_those_that_do_not(qwen: tuple[Any, Path]) -> None:
    """Ends that nobody knows beforehand; and bits that change under steps on their way."""
    prompts, params = requests()
    engine, plain = (
        captured(qwen[1], enable_prefix_caching=False, async_scheduling=overlap)
        for overlap in (True, False)
    )
    log = launches(engine)
    ends = [done.token_ids[len(done.token_ids) // 2] for done in plain.generate(prompts, params)]
    stops = [replace(its, stop_token_ids=(end,)) for its, end in zip(params, ends, strict=True)]
    assert_same(engine.generate(prompts, stops), plain.generate(prompts, stops))
    assert log.count("ahead") > 3
    found = serve_at_changing_bits(engine, prompts, params)
    assert found[0] == serve_at_changing_bits(plain, prompts, params)[0]
    assert set(found[1]) == set(WIDTHS)


def test_preemption_and_found_prefixes_change_nothing_on_the_gpu(qwen: tuple[Any, Path]) -> None:
    prompts, params = requests(12)
    prompts = [prompts[5][:32] + prompt for prompt in prompts]
    budget = tight_budget(qwen[1], 170, "static:4", **WHERE)
    engine = captured(qwen[1], "static:4", memory_budget=budget)
    eager = open_engine(qwen[1], "static:4", enforce_eager=True, **WHERE)
    assert_same(engine.generate(prompts, params), eager.generate(prompts, params))
    assert engine.status().preemptions > 0
    engine.check_integrity()


@pytest.fixture(scope="module")
def dummy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shape that the fast kernels take."""
    folder = tmp_path_factory.mktemp("dummy")
    settings = {
        "model_type": "qwen2_moe", "hidden_size": 256, "num_hidden_layers": 3, "vocab_size": 900,
        "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 128,
        "moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 128, "max_position_embeddings": 2048,
    }  # fmt: skip
    config = folder / "small.json"
    config.write_text(json.dumps(settings))
    write_folder(config, folder / "model", {})
    return folder / "model"


def bfloat16_engine(folder: Path, policy: str, **settings: Any) -> Engine:
    defaults: dict[str, Any] = {"memory_budget": 1 << 30, "max_num_seqs": 8}
    return Engine.from_artifact(
        folder,
        EngineConfig(
            policy=PrecisionPolicy.parse(policy), device="cuda", load_format="dummy",
            **(defaults | settings),
        ),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("policy", "overlap"),
    [("adaptive", True), ("static:3", True), ("static:6", False), ("dense", False)],
)
def test_decode_steps_wait_once_and_allocate_nothing(
    policy: str, overlap: bool, dummy: Path
) -> None:
    engine = bfloat16_engine(dummy, policy, async_scheduling=overlap)
    assert engine._parts.runner.steps is not None
    params = [
        SamplingParams(temperature=t, top_p=0.9, seed=1, max_tokens=200, ignore_eos=True)
        for t in (0, 0.8, 0, 1.0, 0.7)
    ]
    for number, its in enumerate(params):
        engine.add_request(f"r{number}", random_prompt(40, number), its)
    for _ in range(60):
        engine.step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    with no_waits():
        for _ in range(20):
            assert len(engine.step()) == 5
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before


@pytest.mark.parametrize("policy", ["static:3", "dense"])
def test_fast_kernels_agree_by_calls_and_from_graphs(policy: str, dummy: Path) -> None:
    prompts = [random_prompt(LENGTHS[seed % 7], seed) for seed in range(5)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=0)
    engine = bfloat16_engine(dummy, policy, enable_prefix_caching=False)
    found = engine.generate(prompts, params)
    engine._parts.runner.steps = None
    for mine, its in zip(found, engine.generate(prompts, params), strict=True):
        pairs = zip(mine.token_ids, its.token_ids, mine.logprobs, its.logprobs, strict=True)
        for token, other, entry, wanted in pairs:
            if token != other:  # near ties may fall either way in bfloat16
                break
            assert entry.logprob == pytest.approx(wanted.logprob, abs=0.1)
