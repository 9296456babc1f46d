"""The lab against the engine and against itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pw.evaluation.lab import Lab, LabModel
from pw.evaluation.lab.cache import CachedLab
from pw.evaluation.lab.lab import Window
from pw.evaluation.lab.studies.transitions import single_moves
from pw.evaluation.perplexity import perplexity
from pw.planning.bits_file import write_bits
from support.engines import make_artifact, open_engine, random_prompt


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random checkpoint and its artifact."""
    folder = tmp_path_factory.mktemp("lab")
    make_artifact("qwen2_moe", folder, num_attention_heads=2)
    return folder


@pytest.fixture(scope="module")
def model(made: Path) -> LabModel:
    return LabModel.open(made / "model.pw", made / "checkpoint")


@pytest.fixture(scope="module")
def windows() -> list[torch.Tensor]:
    return [torch.tensor(random_prompt(40, seed)) for seed in range(4)]


@pytest.fixture(scope="module")
def lab(model: LabModel, windows: list[torch.Tensor]) -> Lab:
    return Lab(model, windows)


@pytest.fixture
def mixed(model: LabModel) -> np.ndarray:
    return np.random.default_rng(3).integers(2, 7, model.geometry.blocks)


@pytest.mark.parametrize("bits", [2, 4])
def test_the_engine_gives_the_same_loss_at_one_width(lab: Lab, made: Path, bits: int) -> None:
    engine = open_engine(made / "model.pw", f"static:{bits}")
    served = perplexity(engine, [window.ids.tolist() for window in lab.windows])
    np.testing.assert_allclose(lab.score(lab.model.uniform(bits)).nll, served.chunk_nll, atol=1e-4)


def test_the_engine_gives_the_same_loss_for_mixed_widths(
    lab: Lab, made: Path, mixed: np.ndarray, tmp_path: Path
) -> None:
    write_bits(tmp_path / "bits.json", lab.model.geometry, mixed)
    engine = open_engine(made / "model.pw", f"static:{tmp_path / 'bits.json'}")
    served = perplexity(engine, [window.ids.tolist() for window in lab.windows])
    np.testing.assert_allclose(lab.score(mixed).nll, served.chunk_nll, atol=1e-4)


def test_the_unquantized_model_is_no_distance_from_itself_and_less_far_with_more_bits(
    lab: Lab,
) -> None:
    np.testing.assert_allclose(lab.score(lab.model.unquantized()).kl, 0, atol=5e-5)  # fp16
    kl = [lab.score(lab.model.uniform(bits)).kl.mean() for bits in (2, 3, 4, 6)]
    assert kl == sorted(kl, reverse=True)
    assert kl[-1] > 1e-4


def test_each_window_can_have_its_own_widths(lab: Lab, mixed: np.ndarray) -> None:
    low = lab.model.uniform(2)
    together = lab.score([low, mixed, low, mixed])
    np.testing.assert_allclose(together.nll[::2], lab.score(low).nll[::2], rtol=1e-6)
    np.testing.assert_allclose(together.nll[1::2], lab.score(mixed).nll[1::2], rtol=1e-6)
    with pytest.raises(ValueError, match="2 allocations for 4 windows"):
        lab.score([low, mixed])


def test_what_is_scored_of_a_window_does_not_change_its_context(
    model: LabModel, windows: list[torch.Tensor]
) -> None:
    bits = model.uniform(2)
    whole = Lab(model, windows[:1]).score(bits).nll[0] * 39
    head = Lab(model, [windows[0][:20]]).score(bits).nll[0] * 19
    tail = Lab(model, [Window(windows[0], 20)]).score(bits).nll[0] * 20
    assert tail == pytest.approx(whole - head, rel=1e-4)


def test_single_moves_are_those_of_whole_passes(lab: Lab) -> None:
    base = lab.model.uniform(4)
    blocks = (0, lab.model.geometry.blocks // 2, lab.model.geometry.blocks - 1)
    rises = single_moves(lab, base, 2, blocks)
    usual = lab.score(base).kl.mean()
    for block, rise in zip(blocks, rises, strict=True):
        changed = base.copy()
        changed[block] = 2
        assert rise == pytest.approx(lab.score(changed).kl.mean() - usual, abs=2e-6)
    assert np.abs(rises).max() > 1e-4


def test_scores_are_remembered_by_allocation(
    lab: Lab, mixed: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = CachedLab(lab, tmp_path).score(mixed)
    again = CachedLab(lab, tmp_path)
    monkeypatch.setattr(lab, "score", lambda bits: pytest.fail("measured again"))
    np.testing.assert_array_equal(again.score(mixed).kl, first.kl)
    np.testing.assert_array_equal(again.score([mixed] * 4).nll, first.nll)
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        again.score(mixed + 1 - (mixed == 6))
