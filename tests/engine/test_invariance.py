"""At fixed widths a request's tokens are its own: alone, in any company, after any interruption.

Small counts run always; `make reliability` runs larger ones.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pw.engine import Engine
from pw.engine.request import SamplingParams
from support.engines import open_engine, random_prompt, tight_budget

MANY = pytest.mark.figures


def requests(count: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts and parameters of all kinds."""
    drawn = random.Random(count)
    return [
        (
            random_prompt(drawn.randint(1, 90), seed),
            SamplingParams(
                temperature=drawn.choice((0.0, 0.7, 1.0)),
                top_p=drawn.choice((1.0, 0.9)),
                top_k=drawn.choice((-1, 20)),
                seed=seed,
                max_tokens=drawn.randint(1, 24),
                ignore_eos=True,
                frequency_penalty=drawn.choice((0.0, 0.4)),
                repetition_penalty=drawn.choice((1.0, 1.2)),
                logit_bias=drawn.choice(((), ((9, 3.0),))),
            ),
        )
        for seed in range(count)
    ]


def in_company(
    engine: Engine, asked: list[tuple[list[int], SamplingParams]], seed: int
) -> dict[int, list[int]]:
    """Tokens of each request; they come at random, among others that leave at random."""
    drawn = random.Random(seed)
    order = list(range(len(asked)))
    drawn.shuffle(order)
    tokens: dict[int, list[int]] = defaultdict(list)
    strangers: list[str] = []
    while order or engine.has_work():
        for _ in range(min(len(order), drawn.randint(0, 3))):
            number = order.pop()
            engine.add_request(f"r{number}", *asked[number])
        if drawn.random() < 0.3 and order:
            strangers.append(f"s{len(strangers)}")
            prompt = random_prompt(drawn.randint(1, 60), 1000 + len(strangers))
            engine.add_request(strangers[-1], prompt, SamplingParams(max_tokens=40, seed=3))
        if drawn.random() < 0.3 and strangers:
            engine.abort(strangers[-1])
        for output in engine.step():
            if output.request_id.startswith("r"):
                tokens[int(output.request_id[1:])] += output.token_ids
    return tokens


@pytest.mark.parametrize("count", [24, pytest.param(200, marks=MANY)])
def test_tokens_do_not_depend_on_company(qwen: tuple[Any, Path], count: int) -> None:
    asked = requests(count)
    one = open_engine(qwen[1], "static:4", max_num_batched_tokens=128)
    alone = [list(one.generate([prompt], its)[0].token_ids) for prompt, its in asked]
    for seed, (seqs, tokens) in enumerate([(64, 48), (5, 11), (16, 256)]):
        engine = open_engine(
            qwen[1], "static:4", max_num_seqs=seqs, max_num_batched_tokens=tokens,
        )  # fmt: skip
        found = in_company(engine, asked, seed)
        differing = [number for number in range(count) if found[number] != alone[number]]
        assert differing == []
        engine.check_integrity()


@pytest.mark.parametrize("count", [10, pytest.param(100, marks=MANY)])
def test_the_preempted_write_what_the_undisturbed_write(qwen: tuple[Any, Path], count: int) -> None:
    asked = [(p, replace(its, max_tokens=60)) for p, its in requests(count)]
    roomy = open_engine(qwen[1], "static:4")
    expected = roomy.generate([p for p, _ in asked], [its for _, its in asked])
    assert roomy.status().preemptions == 0
    budget = tight_budget(qwen[1], 170, "static:4")
    for caching in (True, False):
        tight = open_engine(
            qwen[1], "static:4", memory_budget=budget, enable_prefix_caching=caching
        )
        found = tight.generate([p for p, _ in asked], [its for _, its in asked])
        assert tight.status().preemptions >= len(asked) // 8
        for mine, its in zip(found, expected, strict=True):
            assert (mine.token_ids, mine.text) == (its.token_ids, its.text)


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=MANY)])
def test_seeds(qwen: tuple[Any, Path], count: int) -> None:
    engine = open_engine(qwen[1], "static:4")
    prompt = random_prompt(12, 1)

    def texts(seeds: list[int | None]) -> list[tuple[int, ...]]:
        each = [SamplingParams(max_tokens=8, seed=seed, ignore_eos=True) for seed in seeds]
        return [done.token_ids for done in engine.generate([prompt] * len(seeds), each)]

    seeded = texts(list(range(count)))
    assert texts(list(reversed(range(count)))) == seeded[::-1]
    assert len(set(seeded[:8])) == 8  # the choices of one call, seeded one after the other
    assert len(set(texts([None] * count))) >= 0.95 * count
