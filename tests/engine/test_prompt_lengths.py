"""[H08] Prompts of every length: whole or in chunks, alone or together, they mean the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pw.engine.request import SamplingParams
from support.engines import open_engine, random_prompt
from support.logprobs import prompt_values

LONGEST = 240
AROUND_POWERS = sorted(
    {n for k in range(8) for n in (2**k - 1, 2**k, 2**k + 1) if 0 < n <= LONGEST}
)
SCORED = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=0)


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param([*AROUND_POWERS, 93, 94, 95, LONGEST], id="some"),
        pytest.param(range(1, LONGEST + 1), id="all", marks=pytest.mark.figures),
    ],
)
@pytest.mark.parametrize("policy", ["static:3", "dense"])
def test_every_length(qwen: tuple[Any, Path], policy: str, lengths: list[int]) -> None:
    prompts = [random_prompt(length, length) for length in lengths]
    whole = open_engine(qwen[1], policy, max_num_batched_tokens=256, max_num_seqs=1)
    parts = open_engine(qwen[1], policy, max_num_batched_tokens=28, max_num_seqs=5)
    for one, other in zip(
        whole.generate(prompts, SCORED), parts.generate(prompts, SCORED), strict=True
    ):
        assert one.token_ids == other.token_ids
        a, b = (torch.tensor(prompt_values(answer)) for answer in (one, other))
        torch.testing.assert_close(a, b, rtol=1e-4, atol=5e-4)
    for engine in (whole, parts):
        engine.check_integrity()
        assert engine.status().pages_kv == 0
