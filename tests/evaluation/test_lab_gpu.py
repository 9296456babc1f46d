"""The lab on a GPU measures what it measures on a CPU: both compute in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pw.evaluation.lab import Lab, LabModel, model
from pw.evaluation.lab.damage_scores import SCORES, measure_scores
from pw.evaluation.lab.experts import TogetherExperts
from pw.evaluation.lab.studies.dense_bits import round_rows
from pw.evaluation.lab.studies.one_bit import Moments, OneBitModel
from pw.evaluation.lab.studies.transitions import single_moves
from support.engines import make_artifact, random_prompt

NATS = 1e-4  # by which the loss of a window may differ between devices
WINDOWS = [torch.tensor(random_prompt(40, seed)) for seed in range(4)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random checkpoint and its artifact."""
    folder = tmp_path_factory.mktemp("lab")
    make_artifact("qwen2_moe", folder, num_attention_heads=2)
    return folder


def opened(made: Path, device: str) -> LabModel:
    return LabModel.open(made / "model.pw", made / "checkpoint", device)


def compare(here: LabModel, there: LabModel) -> None:
    """Losses, divergences, single moves and scores of damage."""
    labs = Lab(here, WINDOWS), Lab(there, WINDOWS)
    mixed = np.random.default_rng(3).integers(2, 7, here.geometry.blocks)
    for bits in (here.unquantized(), here.uniform(2), mixed):
        one, other = (lab.score(bits) for lab in labs)
        np.testing.assert_allclose(one.nll, other.nll, rtol=0, atol=NATS)
        np.testing.assert_allclose(one.kl, other.kl, rtol=0, atol=NATS)
    moves = [single_moves(lab, here.uniform(4), 2, (0, here.geometry.blocks - 1)) for lab in labs]
    np.testing.assert_allclose(*moves, rtol=0, atol=NATS)
    measured = [measure_scores(lab.model, WINDOWS) for lab in labs]
    for name in (*SCORES, "mass", "tokens"):
        np.testing.assert_allclose(*(found[name] for found in measured), rtol=2e-3, err_msg=name)


def test_code_without_kernels_of_its_own_gives_the_same(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, load = opened(made, "cpu"), model.load_skeleton

    def plain(*given: Any, **_: Any) -> Any:
        return load(*given, plain=True)

    monkeypatch.setattr(model, "load_skeleton", plain)
    as_on_a_gpu = opened(made, "cpu")
    activations = list(as_on_a_gpu._skeleton.activations)
    as_on_a_gpu.experts = TogetherExperts(
        as_on_a_gpu._weight, as_on_a_gpu._bias, activations, as_on_a_gpu._stack
    )
    assert usual._skeleton.flat is not None
    assert as_on_a_gpu._skeleton.flat is None
    compare(usual, as_on_a_gpu)


@pytest.mark.gpu
def test_a_gpu_gives_the_same(made: Path) -> None:
    compare(opened(made, "cpu"), opened(made, "cuda"))


@pytest.mark.gpu
def test_one_bit_and_rounded_rows_are_the_same_on_a_gpu(made: Path) -> None:
    weights = []
    for device in ("cpu", "cuda"):
        plain = opened(made, device)
        one = OneBitModel(plain.artifact, plain.checkpoint, device)
        moments = Moments(one)
        with one.watched(moments), torch.no_grad():
            for ids in WINDOWS:
                one.logits(ids)
        one.moments = moments.sums
        rows = torch.randn(5, 300, generator=torch.Generator().manual_seed(0)).to(device)
        weights.append([one.weight(0, 1).cpu(), one.weight(1, 1).cpu(), round_rows(rows, 3).cpu()])
    for here, there in zip(*weights, strict=True):
        torch.testing.assert_close(here, there, rtol=2e-2, atol=2e-3)  # 16-bit levels
