"""Log-probabilities of prompts: what lm-evaluation-harness scores by, however they are computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pw.engine import Completion, Engine
from pw.engine.request import SamplingParams
from support.engines import VOCABULARY, make_artifact, open_engine, random_prompt, tight_budget

LENGTHS = (150, 1, 2, 64, 65, 33)
TOP = 5
PROMPTS = [random_prompt(length, seed) for seed, length in enumerate(LENGTHS)]


def params(**settings: Any) -> SamplingParams:
    settings = {"max_tokens": 1, "temperature": 0, "logprobs": TOP} | settings
    return SamplingParams(prompt_logprobs=TOP, **settings)


def check(completion: Completion, prompt: list[int], logprobs: torch.Tensor) -> None:
    """Entries of a prompt against the reference's log-softmax [T - 1, V]."""
    first, *entries = completion.prompt_logprobs
    assert first is None
    assert len(entries) == len(prompt) - 1
    for token, entry, row in zip(prompt[1:], entries, logprobs, strict=True):
        assert entry is not None
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(row[token]), abs=5e-4)
        values = [value for _, value in entry.top]
        row = row.clone()
        row[VOCABULARY - 1] = -torch.inf  # has no text
        assert values == pytest.approx(row.topk(TOP).values.tolist(), abs=5e-4)
        assert values == sorted(values, reverse=True)
        # Greedy or not is decided by exact equality, wherever the reference is sure of it.
        gap = float(row.max() - row[token])
        if gap == 0 or gap > 1e-3:
            assert (entry.logprob == values[0]) == (gap == 0)


@torch.inference_mode()
def reference(model: Any, prompt: list[int]) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0].float()
    return logits[:-1].log_softmax(-1)


@pytest.mark.parametrize("tokens", [200, 7])
def test_entries_are_those_of_transformers(qwen: tuple[Any, Path], tokens: int) -> None:
    engine = open_engine(qwen[1], "dense", max_num_batched_tokens=tokens)
    for prompt, done in zip(PROMPTS, engine.generate(PROMPTS, params()), strict=True):
        check(done, prompt, reference(qwen[0], prompt))
        (entry,) = done.logprobs
        assert entry.logprob == entry.top[0][1]  # greedy, and says so


def test_models_whose_head_does_more_are_scored_right_too(tmp_path: Path) -> None:
    model, artifact = make_artifact("gemma4_text", tmp_path, final_logit_softcapping=5.0)
    engine = open_engine(artifact, "dense", max_num_batched_tokens=90)
    for prompt, done in zip(PROMPTS, engine.generate(PROMPTS, params()), strict=True):
        check(done, prompt, reference(model, prompt))


def same(found: list[Completion], expected: list[Completion]) -> None:
    for mine, its in zip(found, expected, strict=True):
        assert len(mine.prompt_logprobs) == len(its.prompt_logprobs)
        for entry, other in zip(mine.prompt_logprobs[1:], its.prompt_logprobs[1:], strict=True):
            assert entry is not None
            assert other is not None
            assert entry.token_id == other.token_id
            assert entry.logprob == pytest.approx(other.logprob, abs=2e-5)
            assert [v for _, v in entry.top] == pytest.approx([v for _, v in other.top], abs=2e-5)


def test_preemption_and_prefixes_that_were_found_change_nothing(qwen: tuple[Any, Path]) -> None:
    its = params(max_tokens=40, ignore_eos=True, logprobs=None)
    expected = open_engine(qwen[1], "static:4").generate(PROMPTS, its)
    budget = tight_budget(qwen[1], 215, "static:4")
    engine = open_engine(qwen[1], "static:4", memory_budget=budget)
    same(engine.generate(PROMPTS, its), expected)
    assert engine.status().preemptions > 0
    same(engine.generate(PROMPTS, its), expected)  # their prefixes are known now


def test_scores_begin_where_they_are_wanted(qwen: tuple[Any, Path]) -> None:
    engine = open_engine(qwen[1], "static:4")
    whole = engine.generate(PROMPTS, params())
    for start in (1, 2, 40, 64, 149, 150, 200):
        for mine, its in zip(
            engine.generate(PROMPTS, params(prompt_logprobs_start=start)), whole, strict=True
        ):
            count = len(its.prompt_logprobs)
            assert len(mine.prompt_logprobs) == count
            assert mine.prompt_logprobs[:start] == (None,) * min(start, count)
            scored = zip(mine.prompt_logprobs[start:], its.prompt_logprobs[start:], strict=True)
            for entry, other in scored:
                assert entry is not None
                assert other is not None
                assert entry.logprob == pytest.approx(other.logprob, abs=2e-5)


def echo(engine: Engine, max_tokens: int, bias: tuple[tuple[int, float], ...]) -> list[Completion]:
    return engine.generate(PROMPTS, params(max_tokens=max_tokens, logit_bias=bias))


def test_the_one_token_has_its_entry_even_if_it_ends_the_text(qwen: tuple[Any, Path]) -> None:
    engine = open_engine(qwen[1], "static:4")
    (eos,) = engine.tokenizer.eos_token_ids
    for done in echo(engine, 1, ((eos, 100.0),)):
        assert (done.token_ids, done.text, done.finish_reason) == ((eos,), "", "stop")
        (entry,) = done.logprobs
        assert entry.token_id == eos
        assert entry.logprob <= entry.top[0][1]  # the model's own, not what the bias made of it
    for prompt, done in zip(PROMPTS, echo(engine, 0, ()), strict=True):
        assert (done.token_ids, done.logprobs, done.finish_reason) == ((), (), "length")
        assert len(done.prompt_logprobs) == len(prompt)
