"""`quantize --dry-run`: says what will be, reads no weight, refuses what would fail."""

from __future__ import annotations

import os
import shutil
import time
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pw.config import CalibrationConfig, QuantizeConfig, format_bytes, format_seconds
from pw.errors import (
    ConfigError,
    ModelError,
    PartialResultError,
    PwError,
    StaleStageError,
    StoreError,
)
from pw.models.checkpoint import Checkpoint
from pw.models.shards import ShardIndex
from pw.models.testing import make_checkpoint
from pw.store.artifact import Artifact
from pw_pipelines import activations, dry_run, needs, quantize, sensitivity, trace
from pw_pipelines.needs import Needs
from pw_pipelines.savepoint import Savepoint
from pw_pipelines.subject import Subject
from support.offline import QUIET, calibration, random_checkpoint, write_tokenizer

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(ShardIndex, "read", refuse)


def plan(model: Path, text: CalibrationConfig, **settings: object) -> dry_run.DryRunReport:
    config = QuantizeConfig(max_bits=4, calibration=text)
    return dry_run.run(str(model), model.parent / "a.pw", config, **settings)


def test_the_plan_is_what_quantize_then_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_checkpoint(tmp_path / "model", "gemma4", dtype=torch.bfloat16)
    text = calibration(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(ShardIndex, "read", None)
        planned = plan(tmp_path / "model", text)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "text.txt"]
    config = QuantizeConfig(max_bits=4, calibration=text)
    made = quantize.run(str(tmp_path / "model"), tmp_path / "a.pw", config, QUIET)
    for name in ("min_bits", "max_bits", "lut_dtype", "blocks", "dense_bytes", "bytes_by_width"):
        assert getattr(planned, name) == getattr(made, name), name
    assert (planned.samples, planned.tokens) == (made.samples, made.tokens)
    artifact = Artifact.open(tmp_path / "a.pw")
    dense = sum(group.bytes for group in planned.left_alone)
    assert 0 < (artifact.path / "dense.safetensors").stat().st_size - dense < 20_000  # header
    payload = sum(
        path.stat().st_size
        for path in artifact.path.rglob("*")
        if path.is_file() and path.parts[-2] == "0"
    )
    on_disk = payload + dense
    assert planned.disk_bytes <= on_disk <= planned.disk_bytes * 1.05
    assert any(group.name.startswith("model.vision_tower") for group in planned.not_copied)
    down = planned.plan["down"]
    assert (down.count, down.rows, down.cols, down.padded) == (20, 32, 11, (32, 128))
    assert down.bytes_by_width == {b: b * 512 + 32 * 2**b * 2 for b in (2, 3, 4)}
    assert (
        sum(p.count * p.bytes_by_width[3] for p in planned.plan.values())
        == (made.bytes_by_width[3])
    )
    [stage] = planned.stages
    assert (stage.stage, set(stage.seconds)) == ("quantize", {"calibration", "fit"})
    assert min(stage.seconds.values()) >= 0


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "gpt_oss", "deepseek_v3"])
@pytest.mark.usefixtures("no_weights")
def test_a_config_alone_gives_the_plan_of_its_checkpoint(kind: str, tmp_path: Path) -> None:
    random_checkpoint(tmp_path / "model", kind, dtype=torch.bfloat16)
    text = replace(calibration(tmp_path), nsamples=3)
    config, out = QuantizeConfig(max_bits=4, calibration=text), tmp_path / "a.pw"
    stages = ("quantize", "sensitivity", "trace")
    whole = dry_run.run(str(tmp_path / "model"), out, config, stages=stages)
    file = tmp_path / "model" / "config.json"
    alone = dry_run.run_config("elsewhere", file, out, config, stages=stages)
    assert (whole.config_file, alone.config_file) == (None, file)
    for name in ("architecture", "plan", "dense_bytes", "bytes_by_width", "tokens", "lut_dtype"):
        assert getattr(alone, name) == getattr(whole, name), name
    copied = [sum(group.bytes for group in report.left_alone) for report in (whole, alone)]
    assert copied[0] == copied[1]
    assert alone.memory_bytes == whole.memory_bytes
    assert alone.disk_bytes == whole.disk_bytes
    for one, other in zip(whole.stages, alone.stages, strict=True):
        assert replace(one, seconds={}) == replace(other, seconds={})


def test_stages_need_what_they_then_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of hidden states, and bytes that are read at most."""
    random_checkpoint(tmp_path / "model", "mixtral")
    for module in (activations, needs):
        monkeypatch.setattr(module, "MEMORY_BYTES", 0)
    text, out = calibration(tmp_path), tmp_path / "a.pw"
    config = QuantizeConfig(max_bits=4, calibration=text)
    stages = ("quantize", "sensitivity", "trace")
    planned = dry_run.run(str(tmp_path / "model"), out, config, stages=stages, artifacts=2)
    one = dry_run.run(str(tmp_path / "model"), out, config)
    scratch = [stage.scratch_bytes for stage in planned.stages]
    assert planned.disk_bytes - max(scratch) == 2 * (one.disk_bytes - scratch[0])
    sizes: list[int] = []
    clear = Savepoint.clear

    def measured(savepoint: Savepoint) -> None:
        if savepoint.states.is_file():
            sizes.append(savepoint.states.stat().st_size)
        clear(savepoint)

    monkeypatch.setattr(Savepoint, "clear", measured)
    read: list[int] = []
    opened = Checkpoint.open

    def noted(path: Path) -> Checkpoint:
        checkpoints.append(opened(path))
        return checkpoints[-1]

    checkpoints: list[Checkpoint] = []
    monkeypatch.setattr(Checkpoint, "open", noted)
    quantize.run(str(tmp_path / "model"), out, config, QUIET)
    read.append(checkpoints[-1].shards.bytes_read)
    for stage in (sensitivity, trace):
        stage.run(out, text, QUIET)
        read.append(checkpoints[-1].shards.bytes_read)
    assert sizes == scratch
    config_bytes = 3 * (tmp_path / "model" / "config.json").stat().st_size
    for found, stage in zip(read, planned.stages, strict=True):
        assert found <= stage.read_bytes + config_bytes


@pytest.mark.usefixtures("no_weights")
def test_a_distillation_counts_all_experts_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(tmp_path / "model")
    random_checkpoint(tmp_path / "model", "mixtral")
    config = QuantizeConfig(max_bits=4, calibration=calibration(tmp_path))
    how: dict[str, Any] = {"stages": ("quantize", "tune", "distillation"), "steps": 6}
    found = dry_run.run(model, tmp_path / "a.pw", config, **how)
    weights = Checkpoint.open(Path(model)).geometry.weights
    stage = found.stages[2]
    assert stage.stage == "distillation"
    assert stage.memory_bytes > 40 * weights
    assert set(stage.seconds) == {"steps"}
    monkeypatch.setattr(Needs, "memory_there", lambda _: 40 * weights)
    monkeypatch.setattr(needs, "distill_bytes", lambda weights: weights << 20)
    with pytest.raises(ConfigError, match="of memory are needed") as refused:
        dry_run.run(model, tmp_path / "a.pw", config, **how)
    assert "leave `distill` out" in refused.value.hint


@pytest.mark.usefixtures("no_weights")
def test_a_config_alone_is_planned_whatever_room_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_checkpoint(tmp_path / "model", "mixtral")
    monkeypatch.setattr(Needs, "memory_there", lambda _: 3 << 20)
    config = QuantizeConfig(max_bits=4)
    file = tmp_path / "model" / "config.json"
    found = dry_run.run_config("elsewhere", file, tmp_path / "a.pw", config)
    assert found.memory_there == 3 << 20 < found.memory_bytes
    with pytest.raises(ModelError, match=r"cannot read config: `.*gone.json`"):
        dry_run.run_config("elsewhere", tmp_path / "gone.json", tmp_path / "a.pw", config)


def damage_shard(model: Path) -> None:
    file = next(iter(sorted(model.glob("*.safetensors"))))
    file.write_bytes(file.read_bytes()[:-10])


def remove_shard(model: Path) -> None:
    next(iter(sorted(model.glob("*.safetensors")))).unlink()


def occupy_output(model: Path) -> None:
    (model.parent / "a.pw").mkdir()


def empty_text(model: Path) -> None:
    (model.parent / "text.txt").write_text("short")


@pytest.mark.parametrize(
    ("spoil", "kind", "message"),
    [
        (damage_shard, ModelError, "shard is truncated"),
        (remove_shard, ModelError, "shard is missing: `model-00001-of-"),
        (occupy_output, StoreError, "output exists and is not an artifact"),
        (empty_text, ConfigError, "calibration text holds 5 tokens, one window takes 64"),
    ],
)
@pytest.mark.usefixtures("no_weights")
def test_what_would_fail_later_is_refused_at_once(
    spoil: Callable[[Path], None], kind: type[PwError], message: str, tmp_path: Path
) -> None:
    make_checkpoint("mixtral", tmp_path / "model", vocab_size=259, max_shard_size="40KB")
    write_tokenizer(tmp_path / "model")
    text = calibration(tmp_path)
    spoil(tmp_path / "model")
    started = time.process_time()
    with pytest.raises(kind, match=message):
        plan(tmp_path / "model", text)
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (119, "119 s"), (4000, "67 min"), (100_000, "28 h"), (1e6, "12 days")],
)
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize("stage", [dry_run.run, partial(quantize.run, progress=QUIET)])
@pytest.mark.usefixtures("no_weights")
def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(
    stage: Callable[..., object], tmp_path: Path
) -> None:
    make_checkpoint("mixtral", tmp_path / "model", vocab_size=97)
    write_tokenizer(tmp_path / "model")
    config = QuantizeConfig(max_bits=4, calibration=calibration(tmp_path))
    with pytest.raises(ConfigError, match=r"has token \d+, the model knows 97, from 0: `.*text"):
        stage(str(tmp_path / "model"), tmp_path / "a.pw", config=config)


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("samples", [8, 64])
def test_tuning_needs_gradients_at_all_outputs_beside_the_fit(samples: int, tmp_path: Path) -> None:
    """Second moments of them by layer, and a way back for as many samples as they are read from."""
    random_checkpoint(tmp_path / "model", "mixtral", dtype=torch.bfloat16)
    subject = Subject.of_checkpoint(Checkpoint.open(tmp_path / "model"))
    needed = Needs(subject, (samples, 16), [2, 3, 4], "joint", torch.device("cpu"))
    fit, tune, all_back = needed.quantize(), needed.tune(), needed.sensitivity()
    geometry = subject.geometry
    moments = 4 * len(geometry.layers) * geometry.down.rows**2
    assert fit.memory_bytes + moments <= tune.memory_bytes
    assert tune.memory_bytes <= max(fit.memory_bytes, all_back.memory_bytes) + moments + 2
    assert set(tune.seconds) == {"gradients", *fit.seconds}
    assert tune.read_bytes > fit.read_bytes


@pytest.mark.usefixtures("no_weights")
def test_a_disk_too_small_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random_checkpoint(tmp_path / "model", "mixtral")
    text = calibration(tmp_path)
    needed = plan(tmp_path / "model", text).disk_bytes
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 40, 0, needed - 1))
    with pytest.raises(PartialResultError, match=rf"\({needed:,} bytes\) needed, .* free"):
        plan(tmp_path / "model", text)


@pytest.mark.usefixtures("no_weights")
def test_a_folder_or_a_machine_that_will_not_do_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_checkpoint(tmp_path / "model", "mixtral")
    text = calibration(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        with pytest.raises(StoreError, match=f"cannot write into `{tmp_path}`"):
            plan(tmp_path / "model", text)
    needed = plan(tmp_path / "model", text).stages[0].memory_bytes
    monkeypatch.setattr(Needs, "memory_there", lambda _: 3 << 20)
    told = f"about {format_bytes(needed)} of memory are needed, 3.00 MiB are there"
    with pytest.raises(ConfigError, match=told):
        plan(tmp_path / "model", text)


@pytest.mark.parametrize("stage", [dry_run.run, partial(quantize.run, progress=QUIET)])
def test_a_device_that_is_not_there_is_refused(
    stage: Callable[..., object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_checkpoint(tmp_path / "model", "mixtral")
    config = QuantizeConfig(max_bits=4, calibration=calibration(tmp_path))
    arguments = {"model": str(tmp_path / "model"), "out": tmp_path / "a.pw", "config": config}
    with pytest.raises(ConfigError, match="device must be auto, cpu or cuda: `gpu`"):
        stage(**arguments, device="gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch finds no GPU for `--device cuda`"):
        stage(**arguments, device="cuda")
    assert not (tmp_path / "a.pw.partial").exists()


def test_other_settings_than_an_existing_artifacts_are_refused(tmp_path: Path) -> None:
    random_checkpoint(tmp_path / "model", "mixtral")
    text = calibration(tmp_path)
    config = QuantizeConfig(max_bits=3, calibration=text)
    quantize.run(str(tmp_path / "model"), tmp_path / "a.pw", config, QUIET)
    with pytest.raises(StaleStageError, match="max_bits was `3`, now `4`"):
        plan(tmp_path / "model", text)
    assert plan(tmp_path / "model", text, overwrite=True).max_bits == 4


def test_long_texts_need_room_for_hidden_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_checkpoint(tmp_path / "model", "mixtral")
    text = calibration(tmp_path)
    small = plan(tmp_path / "model", text)
    monkeypatch.setattr(needs, "MEMORY_BYTES", 1000)
    states = 2 * 8 * 64 * 32 * 4  # in and out, tokens, hidden size, float32
    spilled = plan(tmp_path / "model", text)
    assert spilled.disk_bytes - small.disk_bytes == states
    assert small.memory_bytes - spilled.memory_bytes <= states
