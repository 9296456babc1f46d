"""Codebooks fitted for planned widths: which widths are planned, and an artifact made anew."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pw.blocks import MODULES, Module
from pw.config import QuantizeConfig, TuneConfig
from pw.errors import ConfigError, StaleStageError, StoreError
from pw.store.artifact import Artifact
from pw.store.verify import verify
from pw_pipelines import fitting, quantize, sensitivity, trace, tune
from pw_pipelines.focus import plan_focus
from pw_pipelines.tune import TuneReport
from support.offline import QUIET, calibration, measured_artifact, tree_digests

BITS = TuneConfig(2.5)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model, quantized and measured. Not to be changed."""
    return measured_artifact(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def tuned(source: Path) -> TuneReport:
    return tune.run(source, source.with_name("tuned.pw"), BITS, QUIET)


def test_planned_widths_take_the_bytes_of_the_uniform_one_and_lose_less(source: Path) -> None:
    artifact = Artifact.open(source)
    geometry = artifact.geometry
    scores = artifact.table("sensitivity").arrays["output_gradient"]  # [L, E, 2, W]

    def resident(width: int, module: Module) -> int:
        shape = geometry.shape(module)
        rows, cols = -(-shape.rows // 32) * 32, -(-shape.cols // 128) * 128
        return width * rows * cols // 8 + sum(2 * rows * 2**b for b in range(2, width + 1))

    focus = plan_focus(artifact, 3.0)
    assert len(focus.counts()) > 1
    planned = uniform = 0
    predicted = 0.0
    for (layer, module), widths in focus.widths.items():
        assert len(widths) == geometry.experts
        planned += sum(resident(width, module) for width in widths)
        uniform += geometry.experts * resident(3, module)
        own = scores[geometry.slot(layer), :, MODULES.index(module)]
        predicted += sum(float(own[e, width - 2]) for e, width in enumerate(widths))
    assert 0.85 * uniform < planned <= uniform
    assert predicted < float(scores[..., 1].sum())
    ends = [plan_focus(artifact, bits).counts() for bits in (2.0, 4.0)]
    assert ends == [{2: geometry.blocks}, {4: geometry.blocks}]


def test_the_new_artifact_is_whole_says_how_it_was_made_and_loses_less(
    source: Path, tuned: TuneReport
) -> None:
    before, after = Artifact.open(source), Artifact.open(tuned.path)
    assert verify(tuned.path) == []
    settings = dict(after.manifest.stages["quantize"].settings)
    focus = settings.pop("focus")
    assert focus == plan_focus(before, 2.5).settings()
    assert sum(map(len, focus["widths"].values())) == before.geometry.blocks
    assert settings.pop("gradient_windows") == 32
    assert settings == dict(before.manifest.stages["quantize"].settings)
    assert set(after.manifest.stages) == {"quantize", "moments", "sensitivity", "routing"}
    assert after.digests("quantize") != before.digests("quantize")
    assert tuned.damage_after < 0.97 * tuned.damage_before


def test_a_second_run_finds_its_work_done_and_other_bits_are_refused(
    source: Path, tuned: TuneReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tree_digests(tuned.path)
    for stage in (quantize, sensitivity, trace):
        monkeypatch.setattr(stage, "ObservedModel", None)
    assert tune.run(source, tuned.path, BITS, QUIET) == tuned
    with pytest.raises(StaleStageError, match=r"focus\.bits was `2\.5`, now `3\.5`"):
        tune.run(source, tuned.path, TuneConfig(3.5), QUIET)
    assert tree_digests(tuned.path) == before


def test_a_stopped_run_leaves_the_source_alone_and_ends_with_the_same_bytes(
    source: Path, tuned: TuneReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, untouched = source.with_name("stopped.pw"), tree_digests(source)
    fit: Callable[..., Any] = fitting.quantize_blocks
    calls = []

    def stop(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return fit(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(fitting, "quantize_blocks", stop)
        with pytest.raises(KeyboardInterrupt):
            tune.run(source, out, BITS, QUIET)
    assert not out.exists()
    assert tree_digests(source) == untouched
    tune.run(source, out, BITS, QUIET)
    assert tree_digests(out) == tree_digests(tuned.path)
    assert tree_digests(source) == untouched


def test_what_cannot_be_tuned_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="in its own place"):
        tune.run(source, source, BITS, QUIET)
    with pytest.raises(ConfigError, match=r"for 5 bits: .* has 2 to 4"):
        tune.run(source, tmp_path / "out.pw", TuneConfig(5.0), QUIET)
    text = calibration(tmp_path, 4, 32)
    model = str(source.with_name("model"))
    refusals: list[tuple[str, type[Exception], str]] = [
        ("kmeans", ConfigError, "cannot tune the `kmeans` codebook"),
        ("joint", StoreError, "has no sensitivity"),
    ]
    for codebook, error, message in refusals:
        config = QuantizeConfig(max_bits=3, calibration=text, codebook=codebook)
        quantize.run(model, tmp_path / f"{codebook}.pw", config, QUIET)
        with pytest.raises(error, match=message):
            tune.run(tmp_path / f"{codebook}.pw", tmp_path / "out.pw", BITS, QUIET)
    assert not (tmp_path / "out.pw").exists()
