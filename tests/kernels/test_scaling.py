"""The model of steps on several GPUs: bytes of a known shape, and a fit that finds what made it."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
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
    weights = 32 * 2 * 3 * 4096 * 14336 // 2  # two experts of each layer, half a byte a weight
    tables = 32 * 2 * (2 * 14336 + 4096) * 16 * 2
    assert shape.even(1) == pytest.approx(2)
    assert shape.experts(2) == weights + tables
    assert shape.attention == 32 * 2 * (2 * 4096 * 4096 + 2 * 4096 * 1024)
    assert shape.kv(8, 8192) == 8 * 8192 * 131072
    assert shape.head == 32000 * 4096 * 2
    step = scaling.Step.of("", shape, 32, 8192, 2, 1e-5)
    assert step.experts == shape.experts(shape.even(32) / 2)
    assert step.rest == (shape.attention + shape.kv(32, 8192)) / 2 + shape.head
    assert step.sums == pytest.approx(64e-5)
    assert scaling.Step.of("", shape, 1, 8192, 2, 0.0, busy=1.4).experts == shape.experts(1.4)


def test_a_fit_finds_what_made_the_steps(scaling: Any) -> None:
    config = json.loads((scaling.CONFIGS / "mixtral-8x7b.json").read_text())
    made = scaling.Machine(2.4e12, 3e12, 5e-5)
    steps = []
    for layers, ranks in ((32, 1), (64, 1), (32, 2)):
        for batch in (1, 8, 32):
            step = scaling.Step.of("", scaling.Shape(layers, 4, config), batch, 8192, ranks, 1e-5)
            steps.append(replace(step, seconds=made.seconds(step)))
    found = scaling.Machine.fit(steps)
    assert found.experts == pytest.approx(made.experts)
    assert found.rest == pytest.approx(made.rest)
    assert found.layer == pytest.approx(made.layer)


def test_a_sum_lies_between_those_measured(scaling: Any) -> None:
    sums = [
        {"way": "kernel", "tokens": 8, "graph_us": 2.0},
        {"way": "nccl", "tokens": 8, "graph_us": 10.0},
        {"way": "nccl", "tokens": 32, "graph_us": 16.0},
    ]
    assert scaling.measured_sum(sums, 20, "nccl") == pytest.approx(13e-6)
    assert scaling.measured_sum(sums, 8, "kernel") == pytest.approx(2e-6)
