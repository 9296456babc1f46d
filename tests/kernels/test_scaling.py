"""The model of steps on several GPUs: bytes of a known shape, and a fit that finds what made it."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "kernels" / "bench" / "scaling.py"


@pytest.fixture(scope="module")
def scaling() -> Any:
    spec = importlib.util.spec_from_file_location("scaling", BENCH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["scaling"] = module
    spec.loader.exec_module(module)
    return module


def test_bytes_of_mixtral(scaling: Any) -> None:
    config = json.loads((scaling.CONFIGS / "mixtral-8x7b.json").read_text())
    shape = scaling.Shape(32, 4, config)
    weights = 32 * 2 * 3 * 4096 * 14336 // 2  # two of eight experts, half a byte each
    tables = 32 * 2 * (2 * 14336 + 4096) * 16 * 2
    assert shape.experts(1) == weights + tables
    assert shape.attention == 32 * 2 * (2 * 4096 * 4096 + 2 * 4096 * 1024)
    assert shape.kv(8, 8192) == 8 * 8192 * 131072
    assert shape.head == 32000 * 4096 * 2
    shared = shape.experts(32) + shape.attention + shape.kv(32, 8192)
    assert shape.read(32, 8192, 2) == shared / 2 + shape.head


def test_a_fit_finds_what_made_the_steps(scaling: Any) -> None:
    config = json.loads((scaling.CONFIGS / "mixtral-8x7b.json").read_text())
    made = scaling.Machine(3e12, 5e-5)
    rows = []
    for layers in (32, 64):
        shape = scaling.Shape(layers, 4, config)
        for batch in (1, 8, 32):
            seconds = made.step(shape, batch, 8192, 1, 0.0)
            rows.append((shape.read(batch, 8192, 1), layers, seconds))
    found = scaling.Machine.fit(rows)
    assert found.bandwidth == pytest.approx(made.bandwidth)
    assert found.layer == pytest.approx(made.layer)
    shape = scaling.Shape(32, 4, config)
    with_sums = found.step(shape, 1, 8192, 2, 1e-5) - found.step(shape, 1, 8192, 2, 0.0)
    assert with_sums == pytest.approx(64e-5)


def test_a_sum_lies_between_those_measured(scaling: Any) -> None:
    sums = [{"tokens": 8, "graph_us": 10.0}, {"tokens": 32, "graph_us": 16.0}]
    assert scaling.measured_sum(sums, 20) == pytest.approx(13e-6)
