"""Codes and tables trained on the divergence from the unquantized model."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pw.blocks import BlockKey
from pw.config import QuantizeConfig, TuneConfig
from pw.errors import ConfigError, StoreError
from pw.models.checkpoint import Checkpoint
from pw.models.dequantized import DequantizedBlocks
from pw.models.tokenizer import load_tokenizer
from pw.store.artifact import Artifact
from pw.store.verify import verify
from pw.store.writer import ArtifactWriter
from pw_pipelines import distill, latents, quantize, tune
from pw_pipelines.calibration import calibration_set
from pw_pipelines.distill import Distillation
from pw_pipelines.focus import Focus, plan_focus
from pw_pipelines.gpu_memory import host_bytes
from pw_pipelines.latents import Blocks
from pw_pipelines.observation import ObservedModel
from pw_pipelines.ranks import Ranks
from pw_pipelines.training_text import read_texts
from support.offline import QUIET, calibration, measured_artifact, tree_digests

CPU = torch.device("cpu")
STEPS = TuneConfig(2.5, distill=6)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model, quantized and measured. Not to be changed."""
    return measured_artifact(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def fitted(source: Path) -> Path:
    tune.run(source, source.with_name("fitted.pw"), TuneConfig(2.5), QUIET)
    return source.with_name("fitted.pw")


@pytest.fixture(scope="module")
def distilled(source: Path) -> Path:
    tune.run(source, source.with_name("distilled.pw"), STEPS, QUIET)
    return source.with_name("distilled.pw")


@pytest.fixture(scope="module")
def focus(source: Path) -> Focus:
    return plan_focus(Artifact.open(source), 2.5)


def training(source: Path, fitted: Path, focus: Focus) -> tuple[Blocks, Distillation, torch.Tensor]:
    checkpoint = Checkpoint.open(source.with_name("model"))
    model, artifact = ObservedModel(checkpoint, dtype=torch.float32), Artifact.open(fitted)
    blocks = Blocks(artifact, checkpoint, focus, CPU)
    settings = QuantizeConfig(calibration=calibration(source.parent, 40, 32)).calibration
    windows = read_texts(settings, "", checkpoint).windows
    return blocks, Distillation(model, blocks, 6), windows


def test_training_starts_at_the_weights_of_the_artifact(
    source: Path, fitted: Path, focus: Focus
) -> None:
    blocks, _, _ = training(source, fitted, focus)
    blocks.refresh()
    decoded = DequantizedBlocks(Artifact.open(fitted), CPU)
    for key in blocks.keys:
        torch.testing.assert_close(blocks.weight(key), decoded.weight(key, blocks.bits(key)))
        assert torch.equal(blocks.codes(key), blocks.codes(key, changed=False))


def test_gradients_are_those_of_the_divergence(source: Path, fitted: Path, focus: Focus) -> None:
    blocks, run, windows = training(source, fitted, focus)
    some = windows[:2]
    seen: dict[BlockKey, torch.Tensor] = {}
    blocks.backward = seen.update  # type: ignore[method-assign]
    run.step(some, 0.5)
    assert len(seen) > len(blocks.keys) // 2  # most experts are routed to, in two windows
    assert set(seen) <= set(blocks.keys)
    held = {key: blocks.weight(key) for key in blocks.keys}
    for key in list(seen)[::5]:
        direction = torch.randn_like(held[key])
        size = 1e-3 * held[key].norm() / direction.norm()
        found = []
        for sign in (-1, 1):
            blocks._now = {**held, key: held[key] + sign * size * direction}
            blocks.refresh = lambda: None  # type: ignore[method-assign]
            found.append(run.divergence(some))
        slope = (found[1] - found[0]) / (2 * float(size))
        expected = float((seen[key] * direction).sum())
        assert slope == pytest.approx(expected, rel=0.05, abs=1e-4)


def test_gradients_reach_latents_as_they_are_and_tables_as_sums(
    source: Path, fitted: Path, focus: Focus
) -> None:
    blocks, _, _ = training(source, fitted, focus)
    blocks.refresh()
    key = blocks.keys[3]
    gradient = torch.randn_like(blocks.weight(key))
    blocks.backward({key: gradient})
    latent, table = blocks.latents[key], blocks.tables[key]
    assert latent.grad is not None
    assert table.grad is not None
    torch.testing.assert_close(latent.grad, blocks._tied(gradient, table))
    codes = blocks._tied(blocks.codes(key).long() >> (blocks.most - blocks.bits(key)), table)
    sums = torch.zeros_like(table).scatter_add_(1, codes, latent.grad)
    torch.testing.assert_close(table.grad, sums)
    assert blocks.latents[blocks.keys[4]].grad is None


def test_the_divergence_falls_on_text_that_was_not_trained_on(
    source: Path, fitted: Path, distilled: Path, focus: Focus
) -> None:
    before, after = Artifact.open(fitted), Artifact.open(distilled)
    assert verify(distilled) == []
    record = after.manifest.stages["quantize"]
    assert record.report["divergence"]["after"] < 0.95 * record.report["divergence"]["before"]
    settings = dict(record.settings)
    assert settings.pop("distillation")["steps"] == 6
    assert settings == dict(before.manifest.stages["quantize"].settings)
    assert set(after.manifest.stages) == {"quantize", "moments", "sensitivity", "routing"}
    assert after.manifest.stages["moments"] == before.manifest.stages["moments"]
    assert (distilled / "dense.safetensors").read_bytes() == (
        fitted / "dense.safetensors"
    ).read_bytes()
    assert not Path(f"{distilled}.fitted").exists()
    for key in after.geometry.keys():
        own = focus.widths[key.layer, key.module][key.expert]
        for bits in after.manifest.widths:
            same = torch.equal(after.lut(key, bits), before.lut(key, bits))
            assert same == (bits != own), (key, bits)


def test_a_second_run_finds_its_work_done_and_a_stopped_one_ends_with_the_same_bytes(
    source: Path, distilled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, whole = source.with_name("stopped.pw"), tree_digests(distilled)
    with monkeypatch.context() as patch:
        patch.setattr(distill, "ObservedModel", None)
        patch.setattr(quantize, "ObservedModel", None)
        tune.run(source, distilled, STEPS, QUIET)
    step = Distillation.step

    def stop(self: Distillation, windows: torch.Tensor, done: float) -> None:
        if done > 0.5:
            raise KeyboardInterrupt
        step(self, windows, done)

    with monkeypatch.context() as patch:
        patch.setattr(Distillation, "step", stop)
        with pytest.raises(KeyboardInterrupt):
            tune.run(source, out, STEPS, QUIET)
    assert not out.exists()
    with monkeypatch.context() as patch:
        patch.setattr(quantize, "ObservedModel", None)  # the fit is there
        tune.run(source, out, STEPS, QUIET)
    assert tree_digests(out) == whole


def test_stopped_while_blocks_are_written_it_ends_with_those_of_one_training(
    source: Path, distilled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU would not train the same codes again."""
    out, write = source.with_name("half-written.pw"), ArtifactWriter.write_blocks
    work, partial = Path(f"{out}.work"), Path(f"{out}.partial")

    def stop(self: ArtifactWriter, layer: int, *rest: Any) -> None:
        if self.path == out and layer > 0:
            raise KeyboardInterrupt
        write(self, layer, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(ArtifactWriter, "write_blocks", stop)
        with pytest.raises(KeyboardInterrupt):
            tune.run(source, out, STEPS, QUIET)
    assert len(list((partial / ".build" / "blocks").iterdir())) == 2
    saved = (work / "trained.safetensors").read_bytes()
    (work / "trained.safetensors").unlink()
    with pytest.raises(StoreError, match="of a training that is not in") as refused:
        tune.run(source, out, STEPS, QUIET)
    assert f"remove `{partial}`" in refused.value.hint
    (work / "trained.safetensors").write_bytes(saved)
    with monkeypatch.context() as patch:
        patch.setattr(distill, "ObservedModel", None)
        tune.run(source, out, STEPS, QUIET)
    assert tree_digests(out) == tree_digests(distilled)
    assert not work.exists()
    assert not Path(f"{out}.fitted").exists()


def test_without_gain_codes_and_tables_stay_as_they_were_fitted(
    source: Path, fitted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latents, "RATE", 100.0)
    out = source.with_name("worse.pw")
    tune.run(source, out, STEPS, QUIET)
    same = [tree_digests(folder / name) for folder in (out, fitted) for name in ("planes.zarr",)]
    assert same[0] == same[1]
    assert tree_digests(out / "luts.zarr") == tree_digests(fitted / "luts.zarr")


def test_what_cannot_be_trained_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="at least 0 steps"):
        TuneConfig(2.5, distill=-1)
    how: dict[str, Any] = {"ranks": Ranks(0, 2)}
    with pytest.raises(ConfigError, match="one process"):
        tune.run(source, tmp_path / "out.pw", STEPS, QUIET, **how)
    with pytest.raises(ConfigError, match="by distillation alone") as refused:
        TuneConfig(2.5, distill_text="more.txt")
    assert "--distill" in refused.value.hint
    monkeypatch.setattr(distill, "host_bytes", lambda: 1000)
    with pytest.raises(ConfigError, match="at once"):
        tune.run(source, tmp_path / "out.pw", STEPS, QUIET)
    assert not (tmp_path / "out.pw").exists()


def test_other_text_is_trained_on_beside_the_calibration_text(source: Path) -> None:
    checkpoint = Checkpoint.open(source.with_name("model"))
    text = calibration(source.parent, 40, 32)
    more = source.with_name("more.txt")
    more.write_text("A text of other words, again and again. " * 200, "utf-8")
    alone, both = (read_texts(text, name, checkpoint) for name in ("", str(more)))
    own = len(alone.windows)
    assert len(both.windows) > own
    assert torch.equal(both.windows[:own], alone.windows)
    assert torch.equal(both.held_back, alone.held_back)
    assert set(alone.record) == {"windows"}
    assert both.record["windows"] != alone.record["windows"]
    digest = hashlib.sha256(more.read_bytes()).hexdigest()
    assert both.record["text"] == {"name": "more.txt", "sha256": digest}
    assert both.dropped == 0
    held_back = alone.held_back
    assert not (alone.windows[:, None] == held_back).all(2).any()  # held back is held back
    drawn = calibration_set(text, load_tokenizer(checkpoint.path))
    assert alone.fit.digest == both.fit.digest == drawn.digest  # what blocks are fitted on, as ever


def test_other_text_that_is_held_back_is_not_trained_on(source: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(source.with_name("model"))
    text = calibration(tmp_path, 40, 32)
    alphabet = "bcdfghjklmnpqrstvwxz"
    words = np.random.default_rng(3).choice(list(alphabet), (1600,))
    (tmp_path / "text.txt").write_text("".join(words), "utf-8")  # no run of it comes twice
    tokenizer = load_tokenizer(checkpoint.path)
    held = tokenizer.decode(read_texts(text, "", checkpoint).held_back[0].tolist())
    other, more = "-an other text-" * 40, tmp_path / "more.txt"
    more.write_text(other + held + other, "utf-8")
    found = read_texts(text, str(more), checkpoint)
    every = calibration_set(replace(text, dataset=str(more), nsamples=99), tokenizer)
    assert 1 <= found.dropped <= 2
    own = len(read_texts(text, "", checkpoint).windows)
    assert len(found.windows) == own + len(every.windows) - found.dropped
    more.write_text(held, "utf-8")
    with pytest.raises(ConfigError, match="shares text with what is held back"):
        read_texts(text, str(more), checkpoint)
    more.write_bytes((tmp_path / "text.txt").read_bytes())
    with pytest.raises(ConfigError, match="is the calibration text"):
        read_texts(text, str(more), checkpoint)


def test_the_host_says_what_is_free_without_proc_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_bytes() > 1 << 20

    def refuse(*_: Any) -> str:
        raise PermissionError

    monkeypatch.setattr(Path, "read_text", refuse)
    assert host_bytes() > 1 << 20


@pytest.mark.gpu
def test_a_gpu_trains_as_well(source: Path) -> None:
    out = source.with_name("on-a-gpu.pw")
    tune.run(source, out, STEPS, QUIET, device="cuda")
    found = Artifact.open(out).manifest.stages["quantize"].report["divergence"]
    assert found["after"] < 0.95 * found["before"]
