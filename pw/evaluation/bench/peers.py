"""What a user would run instead: transformers' own `generate`, random weights in the same shape."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

_WARM_UPS = 2  # short answers: libraries choose and tune their kernels by shape


class _Clock:
    """A streamer that notes when tokens come; the first call brings the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _value: Tensor) -> None:
        """Called with tokens that have been read from the device."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Called behind the last."""


def transformers_generate(
    folder: Path,
    device: torch.device,
    contexts: Sequence[int],
    attentions: Sequence[str] = ("sdpa", "eager"),
    tokens: int = 32,
) -> list[dict[str, Any]]:
    """Time of `generate` for one sequence, greedy, in bf16 (fp32 on a CPU).

    Args:
        folder: Has the config.
        device: Weights are made there; nothing else fits beside a large model.
        contexts: Tokens of prompts.
        attentions: Implementations of transformers.
        tokens: To generate after each prompt.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    make: Any = AutoModelForCausalLM
    with device:
        model = make.from_config(config, dtype=dtype)
    model.eval()
    rows = []
    for attention in attentions:
        model.set_attn_implementation(attention)
        for context in contexts:
            for _ in range(_WARM_UPS):
                _generate(model, context, 4)
            times = _generate(model, context, tokens)
            gaps = np.diff(times[1:]) * 1e3
            rows.append(
                {
                    "attention": attention,
                    "experts": getattr(model.config, "_experts_implementation", None),
                    "batch": 1,
                    "context": context,
                    "tokens_per_second": 1e3 / float(np.mean(gaps)),
                    "itl_p50_ms": float(np.percentile(gaps, 50)),
                    "itl_p99_ms": float(np.percentile(gaps, 99)),
                    "ttft_ms": (times[1] - times[0]) * 1e3,
                }
            )
    del model
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return rows


def _generate(model: Any, context: int, tokens: int) -> list[float]:
    """Moments at which the prompt went in and each token came out."""
    from transformers import GenerationConfig

    random = np.random.default_rng(context)
    ids = torch.from_numpy(random.integers(model.config.vocab_size, size=(1, context)))
    ids = ids.to(model.device)
    settings: Any = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0
    )
    clock = _Clock()
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=settings,
            streamer=clock,
        )
    return clock.times
