"""float16 is refused where a model's activations leave its range (CASES H09)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pw.engine.request import SamplingParams
from pw.errors import ConfigError
from support.engines import make_artifact, open_engine, random_prompt


@torch.no_grad()
def louder(model: Any) -> None:
    """Norms 300 times as large, as in models whose residual stream needs bfloat16's range."""
    for name, parameter in model.named_parameters():
        if "layernorm" in name and parameter.dim() == 1:
            parameter.mul_(300)


@pytest.fixture(scope="module")
def loud(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_artifact("gemma4_text", tmp_path_factory.mktemp("loud"), change=louder)[1]


def test_a_dtype_that_overflows_is_refused_at_the_start(loud: Path) -> None:
    with pytest.raises(ConfigError, match="dtype float16 overflows in this model") as refused:
        open_engine(loud, "static:4", dtype="float16")
    assert "--dtype bfloat16" in refused.value.hint


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_wider_dtypes_serve_the_same_model(loud: Path, dtype: str) -> None:
    engine = open_engine(loud, "static:4", dtype=dtype)
    done = engine.generate([random_prompt(9, 1)], SamplingParams(max_tokens=3, temperature=0))
    assert done[0].error is None
    assert engine.status().nonfinite == 0


def test_a_model_within_the_range_is_served_and_the_probe_counts_for_nothing(
    qwen: tuple[Any, Path],
) -> None:
    engine = open_engine(qwen[1], "static:4", dtype="float16")
    status = engine.status()
    assert (status.prompt_tokens, status.finished, status.running) == (0, 0, 0)
    assert engine.generate([[5, 6]], SamplingParams(max_tokens=3))[0].error is None
