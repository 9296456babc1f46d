"""Prefixes that are found instead of computed: equal answers, fewer tokens, no page held back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pw.engine import Engine
from pw.engine.request import RequestOutput, SamplingParams
from support.engines import make_artifact, open_engine, random_prompt, tight_budget

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)


def serve(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams = GREEDY
) -> list[RequestOutput]:
    """Run prompts together; the first output of each."""
    firsts: dict[str, RequestOutput] = {}
    for number, prompt in enumerate(prompts):
        engine.add_request(f"s{number}", prompt, params)
    while engine.has_work():
        for output in engine.step():
            assert output.error is None, output.error
            firsts.setdefault(output.request_id, output)
        engine.check_integrity()
    return [firsts[f"s{number}"] for number in range(len(prompts))]


def settle(engine: Engine) -> None:
    """Idle until nothing has changed for as long as a dwell may last."""
    quiet = 0
    while quiet < 40:
        quiet = 0 if engine.idle_turn() else quiet + 1
    engine.check_integrity()


def test_a_found_prefix_gives_the_same_bits_as_a_computed_one(qwen: tuple[Any, Path]) -> None:
    """The rest of the prompt then has the same chunk as without the cache: nothing may differ."""
    prompt = random_prompt(80, 1)
    engines = [
        open_engine(qwen[1], "static:4", enable_prefix_caching=caching) for caching in (False, True)
    ]
    plain, cached = engines
    serve(cached, [[*prompt[:64], 5]])
    expected = plain.generate([prompt], GREEDY)  # chunks of 32, 32 and 16 tokens
    found = cached.generate([prompt], GREEDY)  # 64 found, a chunk of 16
    assert found == expected
    assert cached.status().prefix_cache_hits == 64
    assert cached.status().prefix_cache_queries == 65 + 80
    assert plain.status().prefix_cache_queries == plain.status().pages_cached == 0


def test_cached_tokens_are_told_and_whole_prompts_leave_one_to_compute(
    qwen: tuple[Any, Path],
) -> None:
    engine = open_engine(qwen[1], "static:3")
    unit = engine._parts.kv.unit
    prompt = random_prompt(3 * unit, 2)
    assert [output.cached_tokens for output in serve(engine, [prompt])] == [0]
    # The last token is computed for its logits, and units are whole.
    again = serve(engine, [prompt, [*prompt, 7], prompt[: unit + 1], random_prompt(40, 3)])
    assert [output.cached_tokens for output in again] == [2 * unit, 3 * unit, unit, 0]
    assert engine.status().pages_kv == 0
    assert 0 < engine.status().pages_cached <= engine.status().pages_free


def test_generated_tokens_are_found_too_as_in_a_conversation(qwen: tuple[Any, Path]) -> None:
    engine = open_engine(qwen[1], "static:3")
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    prompt = random_prompt(20, 4)
    answer = engine.generate([prompt], params)[0].token_ids
    turn = [*prompt, *answer, *random_prompt(10, 5)]
    unit = engine._parts.kv.unit
    expected = (len(prompt) + len(answer) - 1) // unit * unit  # the last token was not computed
    assert serve(engine, [turn])[0].cached_tokens == expected >= 48


def test_prompts_that_arrive_together_share_once_the_first_is_ahead(qwen: tuple[Any, Path]) -> None:
    engine = open_engine(qwen[1], "static:3", max_num_batched_tokens=32)
    system = random_prompt(64, 6)
    prompts = [[*system, *random_prompt(10, seed)] for seed in range(10, 14)]
    firsts = serve(engine, prompts)
    # The first two fill the first steps; while they are computed the others wait and then find.
    assert sorted(output.cached_tokens for output in firsts)[1:] == [64, 64, 64]


def test_a_preempted_sequence_goes_on_where_its_pages_still_are(qwen: tuple[Any, Path]) -> None:
    _, artifact = qwen
    prompts = [random_prompt(20, seed) for seed in range(16)]
    params = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)
    budget = tight_budget(artifact, 135, "static:4")
    tokens = []
    answers = []
    for caching in (False, True):
        engine = open_engine(
            artifact, "static:4", memory_budget=budget, enable_prefix_caching=caching
        )
        answers.append([c.token_ids for c in engine.generate(prompts, params)])
        assert engine.status().preemptions > 0
        tokens.append(engine.status().step_tokens)
        engine.check_integrity()
    assert answers[0] == answers[1]
    assert tokens[1] < tokens[0]


def test_scored_prompts_are_computed_whole_but_leave_their_pages(qwen: tuple[Any, Path]) -> None:
    engine = open_engine(qwen[1], "static:3")
    prompt = random_prompt(50, 7)
    scoring = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    first = engine.generate([prompt], scoring)[0]
    again = engine.generate([prompt], scoring)[0]
    assert again == first
    assert engine.status().prefix_cache_hits == 0
    assert serve(engine, [prompt])[0].cached_tokens == 48
    # Choices of one context: what stands before the first scored token need not be computed.
    for start, reused in ((50, 48), (49, 48), (48, 32), (17, 16), (16, 0), (1, 0)):
        part = replace(scoring, prompt_logprobs_start=start)
        engine.add_request("part", prompt, part)
        (output,) = engine.step() or engine.step()
        assert output.cached_tokens == reused
        assert output.prompt_logprobs[:start] == (None,) * start
        found = [entry.logprob for entry in output.prompt_logprobs[start:] if entry]
        expected = [entry.logprob for entry in first.prompt_logprobs[start:] if entry]
        assert found == pytest.approx(expected, abs=1e-5)


def test_a_request_may_demand_that_its_prefix_was_computed_well(qwen: tuple[Any, Path]) -> None:
    engine = open_engine(qwen[1], "adaptive", prefix_cache_precision="any")
    precision, prompt = engine._parts.precision, random_prompt(50, 8)
    assert engine.status().mean_bits == 6
    precision.release(10**6, "test")
    serve(engine, [prompt])
    settle(engine)
    assert engine.status().mean_bits == 6
    floor = SamplingParams(temperature=0, max_tokens=1, min_bits=5)
    assert serve(engine, [prompt], floor)[0].cached_tokens == 0
    assert serve(engine, [prompt], GREEDY)[0].cached_tokens == 48


@pytest.mark.parametrize(("rule", "reused"), [("not-worse", 0), ("any", 48), ("exact", 0)])
def test_what_pressure_left_behind_is_used_by_rule(
    qwen: tuple[Any, Path], rule: str, reused: int
) -> None:
    engine = open_engine(qwen[1], "adaptive", prefix_cache_precision=rule)
    prompt = random_prompt(50, 9)
    engine._parts.precision.release(10**6, "test")
    low = engine.status().mean_bits
    serve(engine, [prompt])
    settle(engine)
    assert low < engine.status().mean_bits == 6
    assert serve(engine, [prompt])[0].cached_tokens == reused
    # Computed at the widest widths now, it serves at any narrower ones but for `exact`.
    if rule != "any":
        engine._parts.precision.release(10**6, "test")
        expected = 48 if rule == "not-worse" else 0
        assert serve(engine, [prompt])[0].cached_tokens == expected


def test_cached_pages_never_keep_planes_away(qwen: tuple[Any, Path]) -> None:
    """Planes come back over what idle prefixes hold, but for the watermark that is free anyway."""
    _, artifact = qwen
    budget = tight_budget(artifact, kv_tokens=60)
    engines = [
        open_engine(
            artifact,
            memory_budget=budget,
            planner_low_watermark=0.02,
            enable_prefix_caching=caching,
        )
        for caching in (False, True)
    ]
    results = []
    for engine in engines:
        lowest = 6.0
        for seed in range(6):
            serve(engine, [random_prompt(150, 10 * seed + i) for i in range(3)])
            lowest = min(lowest, engine.status().mean_bits)
        assert lowest < 6
        cached = engine.status().pages_cached
        settle(engine)
        results.append((engine.status().mean_bits, engine.status().pages_free))
    assert results[0] == results[1]
    assert cached > 2 * engines[1].status().pages_free >= 2 * engines[1].status().pages_cached


def test_idle_prefixes_go_before_planes(qwen: tuple[Any, Path]) -> None:
    _, artifact = qwen
    budget = tight_budget(artifact, kv_tokens=400)
    engine = open_engine(artifact, memory_budget=budget, planner_low_watermark=0.01)
    settle(engine)
    before = engine.status()
    seen = 0
    for seed in range(8):  # four times the room there is
        serve(engine, [random_prompt(180, 100 + seed)])
        seen = max(seen, engine.status().pages_cached)
    now = engine.status()
    assert now.bytes_released == before.bytes_released
    assert now.mean_bits == before.mean_bits == 6
    assert seen > now.pages_free // 2


def test_a_failed_request_leaves_nothing_to_find(
    qwen: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(qwen[1], "static:3")
    prompt = random_prompt(50, 11)
    serve(engine, [prompt])
    assert engine.status().pages_cached > 0
    skeleton = engine._parts.skeleton
    inner = type(skeleton).logits

    def poisoned(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        return inner(self, hidden) * float("nan")

    monkeypatch.setattr(type(skeleton), "logits", poisoned)
    engine.add_request("bad", prompt, GREEDY)
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    assert outputs[-1].finish_reason == "error"
    monkeypatch.undo()
    assert engine.status().pages_cached == 0
    engine.check_integrity()
    assert serve(engine, [prompt])[0].cached_tokens == 0


def test_the_residual_of_a_found_prefix_is_that_of_the_prompt_that_left_it(
    qwen: tuple[Any, Path],
) -> None:
    engine = open_engine(qwen[1], planner_residual="exact")
    system = random_prompt(96, 12)
    prompts = [[*system, *random_prompt(8, seed)] for seed in (13, 14)]
    plain = open_engine(qwen[1], planner_residual="exact", enable_prefix_caching=False)

    def eta(engine: Engine, prompt: list[int]) -> Any:
        engine.add_request("e", prompt, GREEDY)
        sequence = engine._sequences["e"]
        while sequence.eta is None:
            engine.step()
        while engine.has_work():
            engine.step()
        return np.log(sequence.eta), sequence.cached_tokens

    first, none = eta(engine, prompts[0])
    whole, _ = eta(plain, prompts[1])
    found, cached = eta(engine, prompts[1])
    tail, _ = eta(plain, prompts[1][cached:])  # what statistics of the rest alone would say
    assert (none, cached) == (0, 96)
    assert abs(found - whole).mean() < 0.5 * abs(tail - whole).mean()
    share = 96 / 104
    np.testing.assert_allclose(found, share * first + (1 - share) * tail, atol=0.05)


@pytest.mark.parametrize("kind", ["mixtral", "gemma4_text"])
def test_windows_slide_and_prefixes_of_windowed_layers_are_found(kind: str, tmp_path: Path) -> None:
    """Window 6: the sliding layers hold a few pages whatever the length, and answers stay."""
    _, artifact = make_artifact(kind, tmp_path)
    prompt = random_prompt(120, 15)
    plain = open_engine(artifact, "static:4", enable_prefix_caching=False)
    cached = open_engine(artifact, "static:4")
    serve(cached, [[*prompt[:96], 5]])
    expected = plain.generate([prompt], GREEDY)[0]
    assert cached.generate([prompt], GREEDY)[0] == expected
    assert cached.status().prefix_cache_hits == 96
    cached.check_integrity()

    long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    plain.add_request("long", prompt, long)
    held = []
    while plain.has_work():
        plain.step()
        held.append(plain.status().pages_kv)
    kv = plain._parts.kv
    full = sum(len(s.layers) * s.blocks(219) for s in kv.shapes if s.window is None)
    sliding = sum(len(s.layers) for s in kv.shapes if s.window is not None)
    unit_blocks = max(g.unit_blocks for g in kv._groups if g.shape.window is not None)
    assert max(held[4:]) <= full + sliding * 2 * unit_blocks


def test_a_replay_finds_the_same_prefixes(qwen: tuple[Any, Path], tmp_path: Path) -> None:
    _, artifact = qwen
    budget = tight_budget(artifact, kv_tokens=80)
    system = random_prompt(48, 16)
    prompts = [[*system, *random_prompt(10 + 9 * seed, seed)] for seed in range(6)]
    params = [SamplingParams(temperature=0.8, seed=s, max_tokens=5 + 20 * s) for s in range(6)]
    dials = {
        "planner_low_watermark": 0.01,
        "planner_high_watermark": 0.03,
        "memory_budget": budget,
        "prefix_cache_precision": "any",
    }
    trace = tmp_path / "trace.jsonl"
    runs = []
    for policy, settings in (
        ("adaptive", {"trace": trace}),
        (f"replay:{trace}", {}),
    ):
        engine = open_engine(artifact, policy, **settings, **dials)
        completions = engine.generate(prompts, params)
        engine.close()
        status = engine.status()
        runs.append((completions, status.prefix_cache_hits, status.preemptions))
    assert runs[0] == runs[1]
    assert runs[0][1] > 0
    events = [json.loads(line)["event"] for line in trace.read_text().splitlines()]
    assert events.count("reduce") > 10
