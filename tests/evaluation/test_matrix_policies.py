"""Widths of a comparison's policies beside those that --min-bits and --max-bits allow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pw.config import EngineConfig
from pw.engine import Engine
from pw.errors import ConfigError
from pw.evaluation.bench.matrix import Matrix, run_matrix
from pw.evaluation.bench.matrix_policies import allowed, out_of_bounds
from support.small_matrix import CONFIG, write_model


@pytest.mark.parametrize(
    ("policies", "bounds", "message", "hint"),
    [
        (
            ("dense", "adaptive:2"),
            {"min_bits": 3},
            "policy `adaptive:2` is narrower than --min-bits 3 allows",
            "ask for adaptive:3 or wider, or give --min-bits 2",
        ),
        (
            ("static:4", "static:5"),
            {"max_bits": 4},
            "policy `static:5` is wider than --max-bits 4 allows",
            "ask for static:4 or narrower, or give --max-bits 5",
        ),
        (
            ("held:5", "adaptive:5"),
            {"max_bits": 4},
            "policy `held:5` is wider than --max-bits 4 allows",
            "ask for held:4 or narrower, or give --max-bits 5",
        ),
    ],
)
def test_a_width_out_of_bounds_is_refused_before_any_engine(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    policies: tuple[str, ...],
    bounds: dict[str, int],
    message: str,
    hint: str,
) -> None:
    def opening(*_: Any) -> None:
        raise AssertionError("too late")

    monkeypatch.setattr(Engine, "from_artifact", opening)
    config = replace(CONFIG, **bounds)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as refused:
        run_matrix(write_model(tmp_path), config, Matrix(policies=policies, contexts=(48,)))
    assert (refused.value.message, refused.value.hint) == (message, hint)


def test_widths_at_the_bounds_and_dense_are_allowed() -> None:
    bounds = EngineConfig(min_bits=3, max_bits=6)
    for policy in ("dense", "static:3", "adaptive:3", "held:3", "static:6", "adaptive:6"):
        assert out_of_bounds(policy, bounds) is None


def test_the_policies_of_a_comparison_that_names_none_are_those_within_the_bounds() -> None:
    found = allowed(Matrix.policies, EngineConfig(min_bits=3, max_bits=4))
    assert found == ["dense", "static:4", "static:3", "adaptive:4", "adaptive:3"]
    assert allowed(Matrix.policies, EngineConfig()) == list(Matrix.policies)
