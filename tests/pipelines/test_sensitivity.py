from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pw.blocks import MODULES, BlockKey, Module
from pw.errors import ModelError, StaleStageError
from pw.models.checkpoint import Checkpoint
from pw.models.dequantized import DequantizedBlocks
from pw.models.resolve import resolve_model
from pw.models.tokenizer import load_tokenizer
from pw.store.artifact import Artifact
from pw_pipelines import sensitivity
from pw_pipelines.agreement import divergence, spearman
from pw_pipelines.calibration import calibration_set
from pw_pipelines.moments import THIN_TOKENS, Moments
from pw_pipelines.observation import ObservedModel
from pw_pipelines.sensitivity import GradientSums, SensitivityReport, fill_rare
from support.offline import QUIET, TINY_TEXT, losses


@pytest.fixture(scope="module")
def report(measured: tuple[Path, SensitivityReport]) -> SensitivityReport:
    return measured[1]


@pytest.fixture(scope="module")
def path(measured: tuple[Path, SensitivityReport]) -> Path:
    return measured[0]


@pytest.mark.parametrize("module", MODULES)
def test_sums_are_squares_of_directional_derivatives(model: ObservedModel, module: Module) -> None:
    """Of two tokens only the first has a say in the loss: its (g . dW x) is the slope along dW."""
    window = torch.tensor([[300, 900]])
    keys = list(model.geometry.keys())
    original = Checkpoint.open(resolve_model("tiny")).expert_weight
    steps = {key: 0.01 * torch.randn(1, *original(key).shape) for key in keys}
    sums = GradientSums(model.geometry, 1, steps.__getitem__)
    model.backward(window, sums)
    reached = sums.sums[2, :, MODULES.index(module), 0]
    assert (reached > 0).sum() == 2  # the top-k of the first token
    key = BlockKey(2, int(reached.argmax()), module)

    def loss(scale: float) -> float:
        moved = original(key).float() + scale * steps[key][0]
        return float(losses(model, window, {key: moved}.get))

    slope = (loss(0.5) - loss(-0.5)) / 1.0
    assert reached.max().item() == pytest.approx(slope**2 / 2, rel=0.02)


def test_predicted_loss_is_close_to_the_measured_one(
    path: Path, report: SensitivityReport, model: ObservedModel
) -> None:
    artifact = Artifact.open(path)
    blocks = DequantizedBlocks(artifact, model.device)
    windows = calibration_set(TINY_TEXT, load_tokenizer(path)).windows
    dense = losses(model, windows).mean()
    for index, (bits, tolerance) in enumerate(((2, 0.35), (3, 0.6))):
        held = {key: blocks.weight(key, bits) for key in list(artifact.geometry.keys())}
        low = losses(model, windows, held.__getitem__).mean()
        assert report.totals["output_gradient"][index] == pytest.approx(
            (low - dense).item(), rel=tolerance
        )


def test_output_gradient_ranks_blocks_as_the_measured_divergence_does(
    report: SensitivityReport,
) -> None:
    found = report.agreement
    assert (found.bits, found.blocks) == (2, 24)
    assert all(kl > 0 for kl in found.divergence)
    assert found.spearman["output_gradient"] > 0.7
    assert found.spearman["output_gradient"] > found.spearman["hessian"]


def test_tables_fit_together(path: Path, report: SensitivityReport) -> None:
    artifact = Artifact.open(path)
    table = artifact.table("sensitivity")
    moments = Moments.from_arrays(artifact.table("moments").arrays)
    assert table.attrs["widths"] == list(report.widths) == [2, 3, 4]
    weight = Checkpoint.open(resolve_model("tiny")).expert_weight(BlockKey(1, 2, "down"))
    errors = DequantizedBlocks(artifact, torch.device("cpu")).errors(BlockKey(1, 2, "down"), weight)
    energy = table.arrays["energy_down"][1, 2]
    np.testing.assert_allclose(energy, errors.square().sum(1).numpy(), rtol=1e-5)
    busy = moments.tokens >= THIN_TOKENS
    for index, module in enumerate(MODULES):
        score = np.einsum("lewk,lek->lew", table.arrays[f"energy_{module}"], moments.of(module))
        np.testing.assert_allclose(table.arrays["hessian"][:, :, index][busy], score[busy], 1e-4)
    for metric in sensitivity.METRICS:
        values = table.arrays[metric]
        assert values.shape == (4, 8, 2, 3)
        assert (values > 0).all()
        assert (np.diff(values.sum((0, 1, 2))) < 0).all()


def test_the_same_again_does_nothing_and_other_text_is_refused(
    path: Path, report: SensitivityReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sensitivity, "ObservedModel", None)
    assert sensitivity.run(path, TINY_TEXT, QUIET) == report
    other = replace(TINY_TEXT, nsamples=2)
    with pytest.raises(StaleStageError, match="nsamples was `8`, now `2`"):
        sensitivity.run(path, other, QUIET)


def test_another_checkpoint_is_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not found"):
        sensitivity.run(path, TINY_TEXT, QUIET, model=str(tmp_path / "none"))
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in resolve_model("tiny").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    config = copy / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    with pytest.raises(ModelError, match=r"not the checkpoint .* `config.json` differs"):
        sensitivity.run(path, TINY_TEXT, QUIET, model=str(copy))


def test_rare_experts_get_their_layers_median() -> None:
    values = np.array([1.0, 3.0, 5.0, 0.0, 100.0]).reshape(1, 5, 1, 1)
    tokens = np.array([[500, 500, 500, 0, THIN_TOKENS - 1]])
    filled = fill_rare(values, tokens)[0, :, 0, 0]
    median = 4.0  # of 1, 3, 5, 100: the dead expert has no say
    share = (THIN_TOKENS - 1) / (2 * THIN_TOKENS - 1)
    assert filled.tolist() == pytest.approx([1, 3, 5, median, share * 100 + (1 - share) * median])


def test_divergence_and_rank_correlation() -> None:
    logits = torch.randn(2, 3, 7)
    assert divergence(logits.log_softmax(-1), logits + 5) == pytest.approx(0, abs=1e-6)
    reference, other = torch.tensor([[[0.5, 0.5]]]).log(), torch.tensor([[[0.8, 0.2]]]).log()
    expected = 0.5 * np.log(0.5 / 0.8) + 0.5 * np.log(0.5 / 0.2)
    assert divergence(reference, other) == pytest.approx(expected, rel=1e-5)
    assert spearman(np.array([1.0, 2, 9]), np.array([0.1, 0.2, 0.3])) == pytest.approx(1)
    assert spearman(np.array([1.0, 2, 9]), np.array([3.0, 2, 1])) == pytest.approx(-1)
    assert spearman(np.array([1.0]), np.array([3.0])) == 0
