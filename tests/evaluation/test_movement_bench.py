"""The movement benchmark runs through on a small config and counts what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pw.evaluation.bench.movement import COPY_BYTES, main, rate
from pw.models.testing import CONFIGS


def test_one_table_of_rates_and_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "small.json"
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 2, "max_position_embeddings": 256, "vocab_size": 300}
    config.write_text(json.dumps(CONFIGS["qwen2_moe"] | sizes | heads))
    limits = ["--steps", "4", "--copied", "1MiB", "--max-model-len", "128", "--form", "json"]
    device = ["--device", "cpu", "--memory-budget", "64MiB", "--batch", "2"]
    assert main([str(config), *device, *limits]) == 0
    found = json.loads(capsys.readouterr().out)
    assert all(found[f"copies_of_{size >> 10}_KiB_GB_s"] > 0 for size in COPY_BYTES)
    steps = found["batch_2"]
    assert min(steps["quiet_steps"], steps["moving_steps"]) >= 4
    assert steps["quiet_p50_ms"] <= steps["quiet_p99_ms"]
    assert steps["p99_ratio"] == pytest.approx(steps["moving_p99_ms"] / steps["quiet_p99_ms"])
    assert 0 < steps["moving_safe_point_p50_ms"] <= steps["moving_safe_point_p99_ms"]
    assert steps["raise_to_commit_mean_ms"] > 0
    assert steps["reloaded_bytes"] > 0


def test_a_missing_artifact_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([str(tmp_path / "none.pw"), "--device", "cpu"]) == 1
    assert capsys.readouterr().err.startswith("error: not an artifact")


def test_a_rate_is_bytes_over_time() -> None:
    assert 0 < rate(torch.device("cpu"), 1 << 18, 1 << 20) < 1e4
