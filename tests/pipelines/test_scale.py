"""Costs of all stages, and what few layers say of many."""

from pathlib import Path

import pytest

from pw.config import QuantizeConfig
from pw_pipelines.scale import StageCost, extrapolated, measure, report
from support.offline import calibration, random_checkpoint

STAGES = ["quantize", "sensitivity", "trace", "fit-residuals"]


def test_all_stages_are_measured(tmp_path: Path) -> None:
    random_checkpoint(tmp_path / "model")
    config = QuantizeConfig(max_bits=3, calibration=calibration(tmp_path, nsamples=40))
    costs = measure(tmp_path / "model", tmp_path / "a.pw", config, "cpu")
    assert [cost.stage for cost in costs] == STAGES
    for cost in costs:
        assert 0 < cost.seconds < 600
        assert 1e7 < cost.anonymous_bytes <= cost.resident_bytes


def test_a_whole_model_lies_on_the_line_through_few_layers() -> None:
    assert extrapolated((1, 5), (17.5, 32.5), 24) == pytest.approx(103.75)
    few = [StageCost(name, 3.0, 2_000_000_000, 2_500_000_000, 0) for name in STAGES]
    more = [StageCost(name, 5.0, 2_000_000_000, 2_500_000_000, 0) for name in STAGES]
    told = report((2, 3), (few, more), (10**9, 2 * 10**9), 12).splitlines()
    assert [line.split()[0] for line in told[1:5]] == STAGES
    assert all(line.split()[-1] == "23.0" for line in told[1:5])
    assert told[5] == "12 layers: 92 s in all, artifact 11.0 GB"
