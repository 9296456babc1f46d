"""Penalties, biases and tokens that may not come, against a plain numpy reference, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pw.engine import Engine
from pw.engine.request import SamplingParams
from pw.engine.sampling.draw import Chance
from pw.engine.sampling.sampler import Sampler
from pw.engine.sequence import Sequence
from support.engines import VOCABULARY, open_engine, random_prompt, tight_budget

V = 50
EOS = frozenset({2})
SETTINGS: list[dict[str, Any]] = [
    {},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.7, "min_tokens": 9},
    {"repetition_penalty": 1.3, "logit_bias": ((3, 2.5), (V + 3, 100.0), (7, -100.0))},
    {"repetition_penalty": 0.6, "presence_penalty": -1.0, "frequency_penalty": 0.9},
    {"logit_bias": tuple((token, (token % 9) - 4.0) for token in range(40))},
]


def reference(logits: Any, prompt: list[int], output: list[int], params: SamplingParams) -> Any:
    """One row, token by token."""
    row = logits.numpy().astype(np.float32)
    for token in range(len(row)):
        count = np.float32(output.count(token))
        if token in prompt or count:
            by = np.float32(params.repetition_penalty)
            row[token] = row[token] / by if row[token] > 0 else row[token] * by
        row[token] -= np.float32(params.frequency_penalty) * count
        row[token] -= np.float32(params.presence_penalty) * np.float32(count > 0)
    for token, value in params.logit_bias:
        if token < len(row):
            row[token] += np.float32(value)
    if len(output) < params.min_tokens:
        row[list(EOS)] = -np.inf
    return row


def sequence(prompt: list[int], params: SamplingParams) -> Sequence:
    nothing: Any = None
    return Sequence("r", prompt, params, 99, nothing, None)


@pytest.mark.parametrize("padding", [0, 6])
def test_changed_logits_are_those_of_the_reference(padding: int) -> None:
    torch.manual_seed(3)
    params = [SamplingParams(temperature=0, **settings) for settings in SETTINGS]
    prompts = [[(5 * row + k) % V for k in range(4 * row + 1)] for row in range(len(params))]
    ready = [sequence(prompt, its) for prompt, its in zip(prompts, params, strict=True)]
    sampler = Sampler(V, EOS)
    for _ in range(12):  # outputs grow between the calls, as they do
        logits = torch.randn(len(ready), V + padding) * 4
        before = logits.clone()
        changed = sampler._changed(ready, logits[:, :V])
        chosen = sampler.choose(ready, logits)
        assert torch.equal(logits, before)  # log-probabilities are taken from these
        for row, seq in enumerate(ready):
            expected = reference(before[row, :V], seq.prompt, seq.output, seq.params)
            np.testing.assert_array_equal(changed[row].numpy(), expected)
            assert chosen[row] == int(expected.argmax())
            seq.output.append(int(expected.argmax()) if row % 2 else row)


def test_logits_that_nothing_changes_are_not_copied() -> None:
    logits = torch.randn(2, V)
    assert Sampler(V, EOS)._changed([sequence([1], SamplingParams())] * 2, logits) is None


def test_blocked_tokens_never_come() -> None:
    params = [
        SamplingParams(temperature=0, min_tokens=1, stop_token_ids=(V + 1, 4)),
        SamplingParams(min_tokens=1, stop_token_ids=tuple(range(V - 1)), seed=1),
    ]
    ready = [sequence([1], its) for its in params]
    ready[1].chance = Chance(1)
    logits = torch.randn(2, V)
    logits[0, 4] = 9.0
    tokens = Sampler(V, frozenset()).choose(ready, logits)
    assert tokens[0] == int(logits[0].topk(2).indices[1])
    assert tokens[1] == V - 1


def penalized(seed: int) -> SamplingParams:
    settings = SETTINGS[seed % len(SETTINGS)]
    return SamplingParams(
        temperature=0, max_tokens=24, ignore_eos=True, **{**settings, "min_tokens": 0}
    )


def check_against_reference(engine: Engine, prompts: list[list[int]]) -> None:
    """Each token is the reference's best one, given the model's own logits of that step."""
    seen: dict[tuple[str, int], Any] = {}
    run = engine._parts.runner.run

    def watched(chunks: Any) -> Any:
        logits, scored = run(chunks)
        ready = [chunk.sequence for chunk in chunks if chunk.samples]
        for row, seq in zip(logits, ready, strict=True):
            seen[seq.request_id, len(seq.output)] = row[: VOCABULARY - 1].float()
        return logits, scored

    engine._parts.runner.run = watched  # type: ignore[method-assign]
    params = [penalized(seed) for seed in range(len(prompts))]
    completions = engine.generate(prompts, params)
    for number, (prompt, its, done) in enumerate(zip(prompts, params, completions, strict=True)):
        assert len(done.token_ids) == 24
        for place, token in enumerate(done.token_ids):
            logits = seen[f"generate-1-{number}", place]
            past = list(done.token_ids[:place])
            assert token == int(reference(logits, prompt, past, its).argmax())


def test_penalties_hold_through_chunks_neighbours_and_preemption(qwen: tuple[Any, Path]) -> None:
    prompts = [random_prompt(13 + 9 * seed, seed) for seed in range(6)]
    budget = tight_budget(qwen[1], 110, "static:3", max_num_batched_tokens=9)
    engine = open_engine(qwen[1], "static:3", memory_budget=budget, max_num_batched_tokens=9)
    check_against_reference(engine, prompts)
    assert engine.status().preemptions > 0


def test_penalties_hold_after_a_prefix_that_was_found(qwen: tuple[Any, Path]) -> None:
    shared = random_prompt(80, 5)
    engine = open_engine(qwen[1], "static:3", max_num_seqs=2)
    check_against_reference(engine, [[*shared, *random_prompt(5, seed)] for seed in range(6)])
