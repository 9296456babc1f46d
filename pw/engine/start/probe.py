"""Does the model survive its activations' dtype? Asked once, before the first request.

float16 ends at 65,504. Models trained in bfloat16 may exceed it, and then serve NaN at full speed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch

from pw.engine.completion import Completion
from pw.engine.request import SamplingParams
from pw.errors import ConfigError
from pw.models.tokenizer import Tokenizer

_TOKENS = 64  # of the probe; the first token of a text has the largest activations in many models


class Generates(Protocol):
    """What is asked of an engine here."""

    tokenizer: Tokenizer

    @property
    def max_model_len(self) -> int:
        """Of a request, in tokens."""

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams
    ) -> list[Completion]:
        """Completions in the order of the prompts."""


def refuse_overflow(engine: Generates, dtype: torch.dtype) -> None:
    """Run a prompt through a new engine whose activations are `dtype`.

    Raises:
        ConfigError: Its log-probabilities are not finite.
    """
    if dtype != torch.float16:
        return
    tokenizer, length = engine.tokenizer, min(_TOKENS, engine.max_model_len - 1)
    first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    stride = max(1, tokenizer.vocab_size // length)
    prompt = [*first, *range(0, tokenizer.vocab_size, stride)][:length]
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, prompt_logprobs=0)
    done = engine.generate([prompt], params)[0]
    scored = [entry.logprob for entry in done.prompt_logprobs if entry is not None]
    if done.error is not None or not all(map(math.isfinite, scored)):
        raise ConfigError(
            f"dtype float16 overflows in this model: {done.error or 'NaN'} for a probe of "
            f"{len(prompt)} tokens",
            "use --dtype bfloat16 or float32",
        )
