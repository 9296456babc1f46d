"""Stages that were stopped go on, and those that must fail do so before the work."""

import io
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from pw.errors import PartialResultError, StoreError
from pw.models.layered import LayeredModel
from pw.store.writer import ArtifactWriter
from pw_pipelines import activations, fitting, quantize, sensitivity, trace
from pw_pipelines.progress import Progress, Style
from pw_pipelines.savepoint import Savepoint
from support.offline import QUIET, Small, tree_digests


@pytest.mark.parametrize("codebook", ["joint", "kmeans"])
def test_a_stopped_run_reads_on_from_the_layer_it_was_at(
    codebook: str, small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(small.config, codebook=codebook)
    quantize.run(small.model, tmp_path / "clean.pw", config, QUIET)
    monkeypatch.setattr(activations, "MEMORY_BYTES", 0)  # hidden states need a file
    fit, fits, read = fitting.quantize_blocks, [0], []

    def stop(*arguments: Any) -> Any:
        fits[0] += 1
        if fits[0] == 4:  # the second module of the second layer
            raise KeyboardInterrupt
        return fit(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(fitting, "quantize_blocks", stop)
        with pytest.raises(KeyboardInterrupt):
            quantize.run(small.model, tmp_path / "a.pw", config, QUIET)
    layer = LayeredModel.layer

    def noted(self: LayeredModel, index: int, *arguments: Any) -> Tensor:
        read.append(index)
        return layer(self, index, *arguments)

    monkeypatch.setattr(LayeredModel, "layer", noted)
    told = io.StringIO()
    quantize.run(small.model, tmp_path / "a.pw", config, Progress(Style.PLAIN, stream=told))
    assert set(read) == {1, 2}
    assert (
        f"quantize: goes on from `{tmp_path / 'a.pw.partial'}`: 3 of 6 (layer, module) pairs are "
        "there, next is layer 1 down\n"
        f"quantize: goes on from `{tmp_path / 'a.pw.work' / 'quantize'}`: 1 of 3 passes of layers "
        "are done\n"
    ) in told.getvalue()
    assert tree_digests(tmp_path / "a.pw") == tree_digests(tmp_path / "clean.pw")
    assert not (tmp_path / "a.pw.work").exists()


def test_the_stages_that_follow_say_where_they_go_on(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activations, "MEMORY_BYTES", 0)
    artifact = Path(shutil.copytree(small.artifact, tmp_path / "a.pw"))
    save, text = Savepoint.save, small.config.calibration

    def stop(savepoint: Savepoint, done: int, tensors: Any) -> None:
        save(savepoint, done, tensors)
        if done == 2:
            raise KeyboardInterrupt

    for stage, folder, steps in ((sensitivity, "sensitivity", 6), (trace, "routing", 3)):
        with monkeypatch.context() as patch:
            patch.setattr(Savepoint, "save", stop)
            with pytest.raises(KeyboardInterrupt):
                stage.run(artifact, text, QUIET, model=small.model)
        told = io.StringIO()
        stage.run(artifact, text, Progress(Style.PLAIN, stream=told), model=small.model)
        work = tmp_path / "a.pw.work" / folder
        assert f": goes on from `{work}`: 2 of {steps} passes of layers are" in told.getvalue()


def test_stages_that_may_not_write_are_refused_before_the_work(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    for stage in (sensitivity, trace):
        monkeypatch.setattr(stage, "ObservedModel", None)
    with pytest.raises(StoreError, match="this user may not write into"):
        sensitivity.run(small.artifact, small.config.calibration, QUIET)


def test_a_disk_without_room_for_what_is_copied_is_refused_before_the_work(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = (small.artifact / "dense.safetensors").stat().st_size
    whole = sum(file.stat().st_size for file in small.artifact.rglob("*") if file.is_file())
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 0, whole - dense // 2)
    )
    monkeypatch.setattr(quantize, "ObservedModel", None)
    with pytest.raises(PartialResultError, match="disk full while writing"):
        quantize.run(small.model, tmp_path / "a.pw", small.config, QUIET)


def test_a_savepoint_without_its_blocks_is_not_believed(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activations, "MEMORY_BYTES", 0)
    with monkeypatch.context() as patch:
        patch.setattr(ArtifactWriter, "publish", stopped)
        patch.setattr(Savepoint, "clear", lambda _: None)
        with pytest.raises(KeyboardInterrupt):
            quantize.run(small.model, tmp_path / "a.pw", small.config, QUIET)
    shutil.rmtree(tmp_path / "a.pw.partial")
    quantize.run(small.model, tmp_path / "a.pw", small.config, QUIET)
    assert tree_digests(tmp_path / "a.pw") == tree_digests(small.artifact)


def stopped(*_: object) -> None:
    raise KeyboardInterrupt
