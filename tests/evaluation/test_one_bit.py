"""The lab's width of one bit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from pw.evaluation.lab import room
from pw.evaluation.lab.room import Room, Texts
from pw.evaluation.lab.studies import one_bit
from pw.evaluation.lab.studies.one_bit import OneBitModel, two_levels
from support.engines import make_artifact


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    make_artifact("qwen2_moe", folder, num_attention_heads=2)
    for name, seed in (("calibration", 1), ("heldout", 2)):
        letters = np.random.default_rng(seed).integers(97, 123, 9000)
        (folder / f"{name}.jsonl").write_text(json.dumps({"text": "".join(map(chr, letters))}))
    return folder


def test_levels_are_least_squares_under_the_moments() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(5, 12, generator=generator)
    inputs = torch.randn(60, 12, generator=generator) + torch.randn(60, 1, generator=generator)
    moment = inputs.T @ inputs
    upper = weights > 0
    found = two_levels(weights, upper, moment)
    metric = moment + 1e-2 * moment.diagonal().mean() * torch.eye(12)

    def error(row: int, values: torch.Tensor) -> float:
        gap = weights[row] - values
        return float(gap @ metric @ gap)

    for row in range(5):
        assert len(found[row].unique()) == 2
        for shift in (-0.02, 0.02):
            for side in (upper[row], ~upper[row]):
                assert error(row, found[row] + shift * side) > error(row, found[row])
    assert torch.equal(two_levels(weights, weights > 9, moment).isfinite(), weights == weights)


def test_one_bit_loses_more_than_two_and_only_where_it_is(made: Path) -> None:
    model = OneBitModel.open(made / "model.pw", made / "checkpoint")
    model.moments = {}
    exact = model.weight(3, 0)
    errors = [float((model.weight(3, bits) - exact).square().sum()) for bits in (1, 2, 3)]
    assert errors == sorted(errors, reverse=True)
    assert all(len(row.unique()) <= 2 for row in model.weight(3, 1))


def test_the_study_plans_within_the_bytes_and_measures(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "WINDOW", 64)
    monkeypatch.setattr(one_bit, "CALIBRATION_WINDOW", 64)
    monkeypatch.setattr(one_bit, "MOMENT_WINDOWS", 4)
    monkeypatch.setattr(one_bit, "SCORE_WINDOWS", 2)
    texts = Texts(made / "calibration.jsonl", made / "heldout.jsonl", windows=2)
    place = Room(made / "model.pw", made / "checkpoint", texts)
    found = one_bit.run(place)
    assert found["damage_ratio"] > 1
    assert [row["budget_bits"] for row in found["rows"]] == list(one_bit.BUDGETS)
    assert found["rows"][0]["blocks_of_one"] > 0
    for row in found["rows"]:
        assert row["kl_with"]["mean"] > 0
    assert len(one_bit.tables(found).splitlines()) == 2 + len(one_bit.BUDGETS)
