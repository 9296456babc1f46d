"""Prompts that a new engine runs for its kernels' sake leave no trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pw.engine.context import StepBatch
from pw.engine.graphs.prompts import rehearse_prompts
from pw.engine.request import SamplingParams
from support.engines import make_artifact, open_engine, random_prompt

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)


@pytest.mark.parametrize(
    "kind", ["qwen2_moe", "mixtral", "gemma4_shared", "gpt_oss", "deepseek_v2"]
)
def test_they_store_nothing_and_count_nothing(kind: str, tmp_path: Path) -> None:
    _, artifact = make_artifact(kind, tmp_path)
    engine = open_engine(artifact, enable_prefix_caching=False)
    prompts = [random_prompt(length, length) for length in (40, 7, 90)]
    expected = engine.generate(prompts, GREEDY)
    parts, experts = engine._parts, engine._parts.runner._experts
    pages, free = parts.arena.pages.clone(), parts.pool.free_count
    rehearse_prompts(parts.skeleton, experts, parts.kv)
    assert torch.equal(parts.arena.pages, pages)
    assert parts.pool.free_count == free
    counter: Any = experts
    assert not counter._counter.sums.any()
    assert experts.batch is None
    assert engine.generate(prompts, GREEDY) == expected
    engine.check_integrity()


@pytest.mark.parametrize(("sequences", "few"), [(8, 96), (100, 101)])
def test_they_have_the_shapes_that_attention_is_compiled_for(
    qwen: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch, sequences: int, few: int
) -> None:
    engine = open_engine(
        qwen[1], max_num_seqs=sequences, max_num_batched_tokens=128, memory_budget=1 << 26
    )
    found: list[tuple[int, int]] = []
    attend = StepBatch.attend

    def watched(batch: StepBatch, layer: int, q: Any, *rest: Any, **options: Any) -> Any:
        found.append((len(q), int(batch._seq_lens[0])))
        return attend(batch, layer, q, *rest, **options)

    monkeypatch.setattr(StepBatch, "attend", watched)
    parts = engine._parts
    rehearse_prompts(parts.skeleton, parts.runner._experts, parts.kv)
    longest = parts.kv.block_tables[0].shape[2] * parts.kv.shapes[0].tokens_per_page
    assert list(dict.fromkeys(found)) == [
        (128, 128), (few, few), (few, min(longest, 4096 + few)), (8, 8), (4, 4),
    ]  # fmt: skip
