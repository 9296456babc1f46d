import io
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pw.blocks import MODULES, BlockKey, BlockShape, ExpertGeometry, Module
from pw.config import QuantizeConfig
from pw.errors import (
    ConfigError,
    DamagedModelError,
    StaleStageError,
)
from pw.models.checkpoint import Checkpoint
from pw.models.dequantized import DequantizedBlocks
from pw.models.resolve import resolve_model
from pw.models.tokenizer import load_tokenizer
from pw.store.artifact import Artifact
from pw_kernels.bitplane import unpack_planes
from pw_pipelines import activations, fitting, quantize
from pw_pipelines.calibration import calibration_set
from pw_pipelines.codebook import fit_codebook
from pw_pipelines.fitting import quantize_blocks
from pw_pipelines.moments import Coverage, Moments, measure_moments
from pw_pipelines.observation import ObservedModel
from pw_pipelines.progress import Progress, Style
from pw_pipelines.quantize import auto_max_bits, uniform_bytes
from pw_pipelines.refit import damped, refit
from support.offline import (
    QUIET,
    TINY_TEXT,
    Small,
    calibration,
    random_checkpoint,
    tree_digests,
    write_text,
)

ROOT = Path(__file__).parents[2]


def test_planes_and_tables_give_the_fitted_weights_bit_for_bit() -> None:
    weights, moments = torch.randn(3, 40, 150), torch.rand(3, 150)
    planes, luts = quantize_blocks(weights, moments, 2, 7, torch.bfloat16)
    for expert in range(3):
        book = fit_codebook(weights[expert], moments[expert, None], 2, 7, torch.bfloat16)
        for bits in range(2, 8):
            codes = unpack_planes(planes[expert, :bits], 40, 150)
            assert torch.equal(codes, book.codes >> (7 - bits))
            table = luts[bits][expert]
            reversed_codes = sum(((codes >> p) & 1).long() << (bits - 1 - p) for p in range(bits))
            assert torch.equal(table.gather(1, reversed_codes), book.dequantize(bits))


def test_the_artifact_holds_the_fit_of_the_checkpoint(tiny: Path, model: ObservedModel) -> None:
    artifact = Artifact.open(tiny)
    assert (artifact.min_bits, artifact.max_bits, artifact.lut_dtype) == (2, 4, torch.bfloat16)
    checkpoint = Checkpoint.open(resolve_model("tiny"))
    moments = Moments.from_arrays(artifact.table("moments").arrays)
    blocks = DequantizedBlocks(artifact, torch.device("cpu"))
    windows = calibration_set(TINY_TEXT, load_tokenizer(tiny)).windows
    given: dict[int, dict[Module, Tensor]] = {}

    def give(layer: int, _: Moments, hessians: dict[Module, Tensor]) -> None:
        given[layer] = hessians

    measure_moments(model, windows, give, hessians={0, 3})
    for key in (BlockKey(0, 0, "gate_up"), BlockKey(3, 7, "down")):
        weight = checkpoint.expert_weight(key).float()
        h = torch.from_numpy(moments.of(key.module)[key.layer, key.expert, None])
        start = fit_codebook(weight, h, 2, 4, torch.bfloat16)
        hessian = given[key.layer][key.module][key.expert, None]
        fitted = refit(start, weight[None], hessian).book
        metric = damped(hessian)[0]
        errors = blocks.errors(key, weight)
        for index, bits in enumerate(range(2, 5)):
            assert torch.equal(errors[index], blocks.weight(key, bits) - weight)
            gaps = (errors[index], *(b.dequantize(bits).float() - weight for b in (fitted, start)))
            stored, again, before = (float(((gap @ metric) * gap).sum()) for gap in gaps)
            assert stored == pytest.approx(again, rel=0.01)  # sums in another order flip some codes
            assert stored < 0.97 * before


def test_dense_weights_are_those_of_the_checkpoint(tiny: Path) -> None:
    checkpoint, copy = Checkpoint.open(resolve_model("tiny")), Checkpoint.open(tiny)
    assert copy.dense_keys() == checkpoint.dense_keys()
    assert not copy.has_experts
    for name in checkpoint.dense_keys():
        assert torch.equal(copy.read(name), checkpoint.read(name))


def test_quantizing_twice_gives_the_same_bytes(small: Small, tmp_path: Path) -> None:
    report = quantize.run(small.model, tmp_path / "b.pw", small.config, QUIET)
    assert tree_digests(tmp_path / "b.pw") == tree_digests(small.artifact)
    assert report.blocks == 36
    assert sum(report.coverage.values()) == 18


def test_kmeans_alone_is_what_the_artifact_holds(small: Small, tmp_path: Path) -> None:
    config = replace(small.config, codebook="kmeans")
    quantize.run(small.model, tmp_path / "k.pw", config, QUIET)
    artifact, checkpoint = Artifact.open(tmp_path / "k.pw"), Checkpoint.open(Path(small.model))
    moments = Moments.from_arrays(artifact.table("moments").arrays)
    blocks = DequantizedBlocks(artifact, torch.device("cpu"))
    for key in artifact.geometry.keys():
        slot = artifact.geometry.slot(key.layer)
        h = torch.from_numpy(moments.of(key.module)[slot, key.expert, None])
        book = fit_codebook(checkpoint.expert_weight(key), h, 2, 4, artifact.lut_dtype)
        for bits in (2, 3, 4):
            assert torch.equal(blocks.weight(key, bits), book.dequantize(bits).float())


def test_a_finished_artifact_is_left_alone(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (small.artifact / "manifest.json").stat().st_mtime_ns
    monkeypatch.setattr(fitting, "quantize_blocks", None)
    monkeypatch.setattr(quantize, "measure_moments", None)
    report = quantize.run(small.model, small.artifact, small.config, QUIET)
    assert (small.artifact / "manifest.json").stat().st_mtime_ns == before
    assert report.max_bits == 4


def test_other_settings_are_refused_with_both_values(small: Small, tmp_path: Path) -> None:
    out = tmp_path / "a.pw"
    shutil.copytree(small.artifact, out)
    text = small.config.calibration
    with pytest.raises(StaleStageError, match=r"min_bits was `2`, now `3`"):
        quantize.run(small.model, out, QuantizeConfig(3, 4, text), QUIET)
    original = (small.folder / "text.txt").read_text()
    write_text(small.folder / "text.txt", 6000)  # the same path, another content
    with pytest.raises(StaleStageError, match="calibration_tokens was"):
        quantize.run(small.model, out, small.config, QUIET)
    (small.folder / "text.txt").write_text(original)
    report = quantize.run(small.model, out, QuantizeConfig(3, 4, text), QUIET, overwrite=True)
    assert report.min_bits == Artifact.open(out).min_bits == 3


def test_killed_and_resumed_gives_the_same_bytes(small: Small, tmp_path: Path) -> None:
    paths = os.pathsep.join(str(ROOT / n) for n in ("", "tests", "kernels", "pipelines"))
    script = str(ROOT / "tests" / "support" / "quantize_crash.py")
    text = small.config.calibration.dataset
    subprocess.run(
        [sys.executable, script, small.model, text, str(tmp_path), "0", "3"],
        env={**os.environ, "PYTHONPATH": paths},
        check=True,
    )
    for survived in (0, 3):
        out = tmp_path / f"{survived}.pw"
        partial = out.with_name(f"{survived}.pw.partial")
        assert not out.exists()
        assert partial.exists()
        told = io.StringIO()
        quantize.run(small.model, out, small.config, Progress(Style.PLAIN, stream=told))
        assert tree_digests(out) == tree_digests(small.artifact)
        assert not partial.exists()
        assert (f"{survived} of 6 (layer, module) pairs" in told.getvalue()) == (survived > 0)


def test_experts_that_no_token_reaches(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = random_checkpoint(folder, "gpt_oss")
    dead = {0: (1,), 2: (0, 4)}
    with torch.no_grad():
        for layer, experts in dead.items():
            model.model.layers[layer].mlp.router.bias[list(experts)] = -1e9
    model.save_pretrained(folder)
    text = calibration(tmp_path)
    config = QuantizeConfig(max_bits=4, calibration=text, codebook="kmeans")
    report = quantize.run(str(folder), tmp_path / "a.pw", config, QUIET)
    assert report.coverage["dead"] == 3

    artifact = Artifact.open(tmp_path / "a.pw")
    moments = Moments.from_arrays(artifact.table("moments").arrays)
    found = (moments.coverage == Coverage.DEAD).nonzero()
    assert [index.tolist() for index in found] == [[0, 2, 2], [1, 0, 4]]
    assert (moments.tokens.sum(1) == 2 * 8 * 64).all()
    checkpoint, blocks = Checkpoint.open(folder), DequantizedBlocks(artifact, torch.device("cpu"))
    for slot, expert in ((0, 1), (2, 0), (2, 4)):
        for module in MODULES:  # fitted as if all columns counted the same
            h = moments.of(module)[slot, expert]
            assert (h == h[0]).all()
            assert h[0] > 0
            key = BlockKey(slot, expert, module)
            weight = checkpoint.expert_weight(key)
            plain = fit_codebook(weight, torch.ones(1, weight.shape[1]), 2, 4, artifact.lut_dtype)
            assert torch.equal(blocks.weight(key, 3), plain.dequantize(3).float())

    strict = QuantizeConfig(max_bits=4, calibration=text, strict_coverage=True)
    with pytest.raises(ConfigError, match="layer 0: of 5 experts 1 saw no calibration token"):
        quantize.run(str(folder), tmp_path / "strict.pw", strict, QUIET)


@pytest.mark.parametrize("block", ["layer 0 expert 2 gate_up", "layer 1 expert 2 down"])
def test_a_checkpoint_with_infinite_weights_leaves_nothing(
    block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor of the blocks before: no other checkpoint could go on with them."""
    monkeypatch.setattr(activations, "MEMORY_BYTES", 0)
    model = random_checkpoint(tmp_path / "model", "mixtral")
    experts = model.model.layers[int(block[6])].mlp.experts
    with torch.no_grad():
        getattr(experts, f"{block.split()[-1]}_proj")[2, 0, 0] = torch.inf
    model.save_pretrained(tmp_path / "model")
    config = QuantizeConfig(max_bits=4, calibration=calibration(tmp_path))
    with pytest.raises(DamagedModelError, match=f"weights of {block} are not finite"):
        quantize.run(str(tmp_path / "model"), tmp_path / "a.pw", config, QUIET)
    assert not list(tmp_path.glob("a.pw*"))


def test_tables_of_a_float32_checkpoint_are_float16_where_the_weights_fit(tmp_path: Path) -> None:
    model = random_checkpoint(tmp_path / "model", "mixtral")
    assert quantize.choose_lut_dtype(Checkpoint.open(tmp_path / "model")) is torch.float16
    with torch.no_grad():
        model.model.layers[0].mlp.experts.gate_up_proj[1, 0, 0] = 7e4
    model.save_pretrained(tmp_path / "model")
    assert quantize.choose_lut_dtype(Checkpoint.open(tmp_path / "model")) is torch.bfloat16


def geometry(hidden: int, inner: int) -> ExpertGeometry:
    return ExpertGeometry((0,), 2, 1, BlockShape(2 * inner, hidden), BlockShape(hidden, inner))


def test_auto_width_counts_tables() -> None:
    # Bits a weight at width b: b + 16 * 2^b / K; the dense weight has 16.
    assert auto_max_bits(geometry(2048, 1408), 2, 2) == 8  # 8 + 2 and 8 + 2.9
    assert auto_max_bits(geometry(256, 128), 2, 2) == 6  # 7 bits: 15 and 23
    assert auto_max_bits(geometry(256, 256), 2, 2) == 7  # 7 bits: 15; 8 bits: 24
    assert auto_max_bits(geometry(128, 128), 2, 4) == 7  # float32: 7 bits cost 23 of 32
    with pytest.raises(ConfigError, match="nothing to gain"):
        auto_max_bits(geometry(8, 8), 2, 2)  # one tile for 64 weights


def test_uniform_bytes_are_those_on_disk(tiny: Path) -> None:
    artifact = Artifact.open(tiny)
    luts = sum(artifact.lut(key, 4).nbytes for key in list(artifact.geometry.keys()))
    planes = 4 * 4 * 8 * (256 * 256 + 256 * 128) // 8
    assert uniform_bytes(artifact.geometry, 4) == luts + planes == 2_097_152


def test_every_run_ends_in_an_audit(small: Small, tmp_path: Path) -> None:
    told = io.StringIO()
    quantize.run(small.model, tmp_path / "a.pw", small.config, Progress(Style.PLAIN, stream=told))
    first = told.getvalue()
    assert "audit: expected 36 expert blocks, quantized 36" in first
    assert "times the checkpoint" in first
    assert "done already" not in first
    quantize.run(small.model, tmp_path / "a.pw", small.config, Progress(Style.PLAIN, stream=told))
    again = told.getvalue().removeprefix(first)
    assert "quantize: done already, 36 blocks" in again
    assert "audit: expected 36 expert blocks, quantized 36" in again
    assert "times the checkpoint" not in again


def test_costs_say_what_was_read_and_the_least_it_could_take(small: Small, tmp_path: Path) -> None:
    costs = quantize.run(small.model, tmp_path / "a.pw", small.config, QUIET).costs
    assert set(costs.seconds) == {"opening", "reading", "fitting", "publishing"}
    assert min(costs.seconds.values()) >= 0
    files = Path(small.model).glob("*.safetensors")
    assert costs.bytes_least <= sum(file.stat().st_size for file in files)
    assert 2 * costs.bytes_least < costs.bytes_read < 5 * costs.bytes_least
    assert costs.floor_seconds > 0


def test_coverage_is_recorded(tiny: Path) -> None:
    artifact = Artifact.open(tiny)
    tokens = Moments.from_arrays(artifact.table("moments").arrays).tokens
    counts = {"dead": 0, "thin": int((tokens < 64).sum()), "ok": int((tokens >= 64).sum())}
    seen = TINY_TEXT.nsamples * TINY_TEXT.seqlen
    assert (tokens.sum(1) == 2 * seen).all()
    assert artifact.manifest.stages["quantize"].report == {"coverage": counts, "tokens": seen}
