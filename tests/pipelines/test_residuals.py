import shutil
from pathlib import Path

import numpy as np
import pytest
from sklearn.linear_model import Ridge

from pw.config import QuantizeConfig
from pw.errors import ConfigError, StaleStageError, StoreError
from pw.planning.residual import ResidualHeads
from pw.store.artifact import Artifact
from pw_pipelines import quantize, residuals
from pw_pipelines.residuals import ResidualConfig, fit_layer, split_prompts
from support.offline import QUIET, calibration, random_checkpoint

PROMPTS, FEATURES = 160, 12


def planted(heads: int, noise: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features of odd scales, targets that follow them linearly, and token counts."""
    rng = np.random.default_rng(5)
    scale = 10.0 ** rng.integers(-3, 4, FEATURES)
    features = (rng.normal(size=(PROMPTS, FEATURES)) * scale + 3 * scale).astype(np.float32)
    true = rng.normal(size=(heads, FEATURES)) / scale
    y = features @ true.T + noise * rng.normal(size=(PROMPTS, heads))
    return features, (y - y.mean(0)).astype(np.float32), np.full((PROMPTS, heads), 100, np.int32)


@pytest.fixture
def split() -> tuple[np.ndarray, np.ndarray]:
    return split_prompts(np.arange(PROMPTS) // 4, ResidualConfig(), "m.pw")


def test_documents_are_never_on_both_sides() -> None:
    documents = np.random.default_rng(0).integers(0, 25, 100)
    train, valid = split_prompts(documents, ResidualConfig(validation=0.3), "m.pw")
    assert sorted([*train, *valid]) == list(range(100))
    assert not set(documents[train]) & set(documents[valid])
    assert len(valid) >= 15
    again = split_prompts(documents, ResidualConfig(validation=0.3), "m.pw")
    assert (again[1] == valid).all()


def test_one_long_document_is_split_by_prompt() -> None:
    train, valid = split_prompts(np.zeros(40, np.int64), ResidualConfig(), "m.pw")
    assert (len(train), len(valid)) == (30, 10)


def test_too_few_prompts_are_refused() -> None:
    with pytest.raises(ConfigError, match="31 prompts are too few") as error:
        split_prompts(np.arange(31), ResidualConfig(), "m.pw")
    assert "`pw trace m.pw --nsamples N --overwrite`" in error.value.hint
    with pytest.raises(ConfigError, match="between 0 and 1: 1"):
        ResidualConfig(validation=1.0)


def test_planted_heads_are_found(split: tuple[np.ndarray, np.ndarray]) -> None:
    features, y, counts = planted(6, noise=0.01)
    heads = fit_layer(features, y, counts, *split)
    assert heads.kept.all()
    assert 1 - heads.valid[0].sum() / heads.valid[1].sum() > 0.999
    predicted = features @ heads.coef.T + heads.intercept
    np.testing.assert_allclose(predicted, y, atol=0.1)


def test_heads_of_noise_are_dropped(split: tuple[np.ndarray, np.ndarray]) -> None:
    features, y, counts = planted(8, noise=0.01)
    y[:, :4] = np.random.default_rng(1).normal(size=(PROMPTS, 4)) + 1e-3
    y[split[0], 0] += 1.0  # an offset that holds in training only
    heads = fit_layer(features, y, counts, *split)
    assert heads.kept[4:].all()
    assert not heads.kept[0]
    lost = heads.valid[0] >= heads.valid[1]
    assert (heads.kept == ~lost).all()


def test_missing_targets_do_not_count(split: tuple[np.ndarray, np.ndarray]) -> None:
    features, y, counts = planted(3, noise=0.01)
    gaps = np.random.default_rng(2).random(y.shape) < 0.3
    gaps[:, 2] = True  # an expert that no prompt reaches
    spoiled = np.where(gaps, np.nan, y).astype(np.float32)
    counts[gaps] = 0
    heads = fit_layer(features, spoiled, counts, *split)
    assert heads.kept.tolist() == [True, True, False]
    assert (heads.coef[2] == 0).all()
    predicted = features @ heads.coef[:2].T + heads.intercept[:2]
    np.testing.assert_allclose(predicted, y[:, :2], atol=0.1)


def test_constant_features_and_folding(split: tuple[np.ndarray, np.ndarray]) -> None:
    features, y, counts = planted(1, noise=0.3)
    features[:, 4] = 7.5
    heads = fit_layer(features, y, counts, *split)
    assert heads.coef[0, 4] == 0
    assert np.isfinite(heads.coef).all()
    train = split[0]
    x = (features - features[train].mean(0)) / features[train].std(0).clip(1e-9)
    x[:, 4] = 0
    found = {}
    for alpha in residuals._ALPHAS:  # the same Ridge, of some strength, on plain z-scores
        ridge = Ridge(alpha).fit(x[train], y[train, 0], np.full(len(train), 100 / 116))
        found[alpha] = np.abs(
            ridge.predict(x) - features @ heads.coef[0] - heads.intercept[0]
        ).max()
    assert min(found.values()) < 1e-3


@pytest.fixture(scope="module")
def untraced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact of a random model of 2 layers with 4 experts."""
    folder = tmp_path_factory.mktemp("untraced")
    random_checkpoint(folder / "model", num_hidden_layers=2, num_experts=4)
    config = QuantizeConfig(max_bits=2, codebook="kmeans", calibration=calibration(folder))
    quantize.run(str(folder / "model"), folder / "a.pw", config, QUIET)
    return folder / "a.pw"


@pytest.fixture
def artifact(untraced: Path, tmp_path: Path) -> Artifact:
    """A copy of an artifact with a made-up trace in which heads can be found."""
    shutil.copytree(untraced, tmp_path / "a.pw")
    made = Artifact.open(tmp_path / "a.pw")
    features, y, counts = planted(2 * 8, noise=0.05)
    arrays = {
        "features": np.repeat(features[:, None], 2, 1),
        "y": y.reshape(PROMPTS, 2, 4, 2),
        "counts": counts.reshape(PROMPTS, 2, 4, 2)[..., 0].copy(),
        "documents": np.arange(PROMPTS) // 4,
        "tokens": np.full(PROMPTS, 100),
    }
    made.write_table("routing", arrays, {}, {}, {}, {})
    return made


def test_the_planner_reads_what_was_fitted(artifact: Artifact) -> None:
    report = residuals.run(artifact.path, QUIET)
    assert report.kept == (8, 8)
    assert min(report.r2_valid) > 0.95
    assert report.prompts_train + report.prompts_valid == PROMPTS
    found = Artifact.open(artifact.path)
    heads = ResidualHeads.from_table(found.table("residuals"), clamp=3.0)
    trace = found.table("routing").arrays
    eta = heads.predict(trace["features"][9])
    expected = np.clip(trace["y"][9], -3, 3)
    assert np.abs(np.log(eta) - expected).mean() < 0.1

    assert residuals.run(artifact.path, QUIET) == report  # nothing to do
    with pytest.raises(StaleStageError, match="seed was `0`, now `1`"):
        residuals.run(artifact.path, QUIET, ResidualConfig(seed=1))
    other = residuals.run(artifact.path, QUIET, ResidualConfig(seed=1), overwrite=True)
    assert other != report


def test_an_artifact_without_a_trace_is_refused(untraced: Path) -> None:
    with pytest.raises(StoreError, match="no routing"):
        residuals.run(untraced, QUIET)
