"""DP-LLM: tokens whose error would be large take the wider width, the wanted share of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pw.evaluation.baselines.tokenwise import fit_choosers, tokenwise
from pw.evaluation.lab import Lab, LabModel
from support.engines import make_artifact, random_prompt


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    folder: Path = tmp_path_factory.mktemp("tokenwise")
    make_artifact("qwen2_moe", folder, num_attention_heads=2)
    model = LabModel.open(folder / "model.pw", folder / "checkpoint")
    made = Lab(model, [torch.tensor(random_prompt(64, seed)) for seed in range(3)])
    made.prepare()
    return made


def texts() -> list[torch.Tensor]:
    return [torch.tensor(random_prompt(64, seed)) for seed in range(10, 16)]


@pytest.mark.parametrize("share_low", [0.25, 0.75])
def test_about_the_wanted_share_of_tokens_is_narrow(lab: Lab, share_low: float) -> None:
    low, high = lab.model.uniform(2), lab.model.uniform(4)
    choosers = fit_choosers(lab.model, low, high, share_low, texts())
    with tokenwise(lab.model, choosers) as experts:
        scores = lab.score(high)
        tokens, wide = experts.tokens.tolist()
    assert 1 - wide / tokens == pytest.approx(share_low, abs=0.12)
    narrow, broad = lab.score(low).kl.mean(), lab.score(high).kl.mean()
    assert broad < scores.kl.mean() < narrow


def test_blocks_that_calibration_never_reached_stay_wide(lab: Lab) -> None:
    low, high = lab.model.uniform(2), lab.model.uniform(4)
    choosers = fit_choosers(lab.model, low, high, 0.5, [])
    assert all(chooser.wide(torch.zeros(2, chooser.low.shape[1])).all() for chooser in choosers)


def test_the_widest_tokens_are_those_with_the_largest_error(lab: Lab) -> None:
    low, high = lab.model.uniform(2), lab.model.uniform(4)
    choosers = fit_choosers(lab.model, low, high, 0.5, texts())
    x = torch.randn(200, lab.model.geometry.gate_up.cols) * torch.rand(200, 1)
    error = (lab.model.weight(0, 4) - lab.model.weight(0, 2)) @ x.T
    chosen = choosers[0].wide(x)
    norms = torch.linalg.vector_norm(error, dim=0)
    assert 0 < int(chosen.sum()) < 200
    assert norms[chosen].mean() > norms[~chosen].mean()
    assert np.isfinite(choosers[0].threshold)
