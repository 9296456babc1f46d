"""The movement benchmark runs through on a small config and counts what it says."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from pw.engine.request import RequestOutput
from pw.errors import PwError
from pw.evaluation.bench.movement import COPY_BYTES, Steps, main, rate
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


@dataclass
class Launcher:
    """Whether steps overlap, which the benchmark turns off for a while."""

    _overlaps: bool = True


@dataclass
class Scripted:
    """An engine whose steps give what they are told to."""

    turns: list[list[RequestOutput]]
    _launcher: Launcher = field(default_factory=Launcher)

    def has_work(self) -> bool:
        return bool(self.turns)

    def step(self) -> list[RequestOutput]:
        assert not self._launcher._overlaps
        return self.turns.pop(0)


def outputs(*names: str, error: str | None = None) -> list[RequestOutput]:
    tokens = () if error else (5,)
    return [RequestOutput(name, token_ids=tokens, error=error) for name in names]


def scripted(*turns: list[RequestOutput]) -> tuple[Any, Any]:
    engine = Scripted(list(turns))
    return engine, Steps(engine, 2)  # type: ignore[arg-type]


def test_steps_in_turn_that_lost_a_sequence_are_not_noted() -> None:
    whole, less = outputs("a", "b"), outputs("a")
    engine, steps = scripted(whole, whole, less, whole)
    steps._in_turn(4)
    assert len(steps.in_turn) == 2  # the first was on its way
    assert engine._launcher._overlaps is True


def test_steps_overlap_again_after_one_that_failed() -> None:
    engine, steps = scripted(outputs("a", "b"), outputs("a", error="no page"))
    with pytest.raises(PwError, match="no page"):
        steps._in_turn(4)
    assert engine._launcher._overlaps is True


def test_a_request_that_fails_between_spells_ends_the_benchmark() -> None:
    engine, steps = scripted(outputs("a", error="no page"))
    engine._launcher._overlaps = False
    with pytest.raises(PwError, match="no page"):
        steps._until(lambda: False, 4)
