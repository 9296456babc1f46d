"""Every architecture from checkpoint to answers: the dense policy exact, 8 bits close."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pw.config import QuantizeConfig
from pw.models.testing import KINDS, make_checkpoint
from pw_pipelines import quantize
from support.engines import open_engine
from support.logprobs import engine_logprobs, model_logprobs
from support.offline import QUIET, VOCABULARY, calibration, write_tokenizer


@pytest.mark.parametrize("kind", KINDS)
def test_dense_equals_transformers_and_eight_bits_come_close(kind: str, tmp_path: Path) -> None:
    sizes = {"vocab_size": VOCABULARY}
    if kind == "gemma4_shared":
        sizes["vocab_size_per_layer_input"] = VOCABULARY
    model = make_checkpoint(kind, tmp_path / "model", **sizes)
    write_tokenizer(tmp_path / "model")
    config = QuantizeConfig(max_bits=8, calibration=calibration(tmp_path))
    report = quantize.run(str(tmp_path / "model"), tmp_path / "a.pw", config, QUIET)
    expected = model_logprobs(model.float())
    dense = engine_logprobs(open_engine(tmp_path / "a.pw", "dense", dtype="float32"))
    torch.testing.assert_close(dense, expected, rtol=1e-4, atol=5e-4)
    errors = {}
    for bits in (2, 8):
        got = engine_logprobs(open_engine(tmp_path / "a.pw", f"static:{bits}", dtype="float32"))
        errors[bits] = (got - expected).abs().mean().item()
    assert errors[8] < 0.05
    assert errors[8] < errors[2] / 4
    assert (
        report.blocks
        == 2 * report.coverage["ok"] + 2 * report.coverage["thin"] + 2 * (report.coverage["dead"])
    )
