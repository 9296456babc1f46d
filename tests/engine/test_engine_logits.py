"""The whole engine against transformers: same log-probabilities, same greedy tokens."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from pw.engine.request import SamplingParams
from pw.models.dequantized import DequantizedBlocks
from pw.store.artifact import Artifact
from support.engines import make_artifact, open_engine, random_prompt
from support.logprobs import prompt_values

LENGTHS = (57, 3, 33, 1)
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, prompt_logprobs=0)


@torch.inference_mode()
def reference_logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    """Log-probability of each token but the first given those before it: [T - 1]."""
    ids = torch.tensor(tokens)
    logits = model(input_ids=ids[None], use_cache=False).logits[0].float()
    return logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def check(engine: Any, model: Any) -> None:
    """Prompts in chunks beside decoding sequences give what the model gives them alone."""
    prompts = [random_prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    completions = engine.generate(prompts, GREEDY)
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.prompt_logprobs[0] is None
        if len(prompt) > 1:
            expected = reference_logprobs(model, prompt)
            got = torch.tensor(prompt_values(completion))
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=5e-4)
        sequence = list(prompt)
        for token in completion.token_ids:
            with torch.inference_mode():
                logits = model(input_ids=torch.tensor([sequence]), use_cache=False).logits[0, -1]
            # The chosen token is the best one, ties within rounding allowed.
            assert logits.max() - logits[token] < 1e-3
            sequence.append(token)
    engine.check_integrity()
    assert engine.status().pages_kv == 0


@pytest.mark.parametrize("kind", ["qwen2_moe", "mixtral", "gemma4_text", "gemma4_shared"])
def test_dense_policy_gives_transformers_logits(kind: str, tmp_path: Path) -> None:
    model, artifact = make_artifact(kind, tmp_path)
    check(open_engine(artifact, "dense"), model)


@pytest.mark.parametrize("bits", [2, 4, 6])
def test_static_widths_equal_the_dequantized_model(qwen: tuple[Any, Path], bits: int) -> None:
    _, artifact = qwen
    model = copy.deepcopy(qwen[0])
    blocks = DequantizedBlocks(Artifact.open(artifact), torch.device("cpu"))
    with torch.no_grad():
        for key in Artifact.open(artifact).geometry.keys():
            experts = model.model.layers[key.layer].mlp.experts
            weights = experts.gate_up_proj if key.module == "gate_up" else experts.down_proj
            weights[key.expert] = blocks.weight(key, bits)
    check(open_engine(artifact, f"static:{bits}"), model)
