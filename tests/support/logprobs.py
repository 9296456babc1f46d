"""Log-probabilities of prompts: an engine's and those of a transformers model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pw.engine import Completion, Engine
from pw.engine.request import SamplingParams
from support.engines import random_prompt

PROMPTS = [random_prompt(41, 1), random_prompt(8, 2)]
_ONLY_PROMPT = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)


def engine_logprobs(engine: Engine) -> Tensor:
    """Of each token of `PROMPTS` but their first ones, given those before it."""
    done = engine.generate(PROMPTS, _ONLY_PROMPT)
    engine.check_integrity()
    return torch.cat([torch.tensor(prompt_values(one)) for one in done])


def prompt_values(completion: Completion) -> list[float]:
    """Log-probabilities of a prompt's tokens but the first, which has none."""
    first, *others = completion.prompt_logprobs
    assert first is None
    return [entry.logprob for entry in others if entry is not None]


@torch.inference_mode()
def model_logprobs(model: Any) -> Tensor:
    """The same from a transformers model."""
    parts = []
    for prompt in PROMPTS:
        ids = torch.tensor(prompt)
        logits = model(input_ids=ids[None], use_cache=False).logits[0].float()
        parts.append(logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0])
    return torch.cat(parts)
