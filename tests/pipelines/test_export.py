"""A dequantized checkpoint: transformers loads it and computes what the engine computes."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pw.blocks import BlockKey
from pw.config import QuantizeConfig
from pw.errors import ConfigError, PartialResultError, StoreError
from pw.models.checkpoint import Checkpoint
from pw.models.dequantized import DequantizedBlocks
from pw.models.shards import ShardIndex
from pw.models.testing import CONFIGS
from pw.store.artifact import Artifact
from pw_pipelines import export, quantize
from support.engines import open_engine
from support.logprobs import engine_logprobs, model_logprobs
from support.offline import QUIET, calibration, random_checkpoint


def exported(kind: str, folder: Path, dtype: torch.dtype = torch.bfloat16) -> tuple[Path, Path]:
    """An artifact of a random model and what `pw export --bits 4` makes of it."""
    random_checkpoint(folder / "model", kind, dtype=dtype)
    config = QuantizeConfig(max_bits=5, calibration=calibration(folder))
    quantize.run(str(folder / "model"), folder / "a.pw", config, QUIET)
    report = export.run(folder / "a.pw", folder / "out", 4, QUIET)
    assert (report.bits, report.path) == (4, folder / "out")
    return folder / "a.pw", folder / "out"


@pytest.mark.parametrize("kind", ["qwen2_moe", "mixtral", "gemma4", "gpt_oss", "granitemoe"])
def test_transformers_gives_the_logits_of_the_engine_at_that_width(
    kind: str, tmp_path: Path
) -> None:
    artifact, out = exported(kind, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    got = engine_logprobs(open_engine(artifact, "static:4", dtype="float32"))
    torch.testing.assert_close(got, model_logprobs(model), rtol=1e-4, atol=5e-4)


@pytest.mark.parametrize("kind", [kind for kind in CONFIGS if kind != "gemma4_shared"])
def test_names_and_layout_are_those_of_the_original_checkpoint(kind: str, tmp_path: Path) -> None:
    artifact, out = exported(kind, tmp_path)
    original, copy = ShardIndex.open(tmp_path / "model"), ShardIndex.open(out)
    assert copy.keys() == original.keys()
    for name in original.keys():
        assert copy.entry(name).shape == original.entry(name).shape
        assert copy.entry(name).dtype == original.entry(name).dtype
    checkpoint, again = Checkpoint.open(tmp_path / "model"), Checkpoint.open(out)
    for name in checkpoint.dense_keys():
        assert torch.equal(again.read(name), checkpoint.read(name))
    blocks = DequantizedBlocks(Artifact.open(artifact), torch.device("cpu"))
    for key in (
        checkpoint.geometry.key(0),
        checkpoint.geometry.key(checkpoint.geometry.blocks - 1),
    ):
        assert torch.equal(again.expert_weight(key).float(), blocks.weight(key, 4))


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    artifact, out = exported("mixtral", tmp_path, torch.float32)
    tensors = load_file(out / "model-00002-of-00004.safetensors")
    assert tensors["model.layers.0.block_sparse_moe.experts.3.w2.weight"].dtype == torch.float16
    key = BlockKey(0, 3, "down")
    blocks = DequantizedBlocks(Artifact.open(artifact), torch.device("cpu"))
    expected = tensors["model.layers.0.block_sparse_moe.experts.3.w2.weight"].float()
    assert torch.equal(expected, blocks.weight(key, 4))
    with pytest.raises(ConfigError, match="width is not in the artifact: 6"):
        export.run(artifact, tmp_path / "more", 6, QUIET)
    with pytest.raises(StoreError, match="output exists"):
        export.run(artifact, out, 4, QUIET)


@pytest.mark.parametrize("early", [True, False])
def test_a_full_disk_leaves_nothing(
    early: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact, out = exported("mixtral", tmp_path)
    shutil.rmtree(out)
    free = 1 << 10 if early else 1 << 40
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 0, free))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr("pw_pipelines.shard_writer.write_tensors", full)
    with pytest.raises(PartialResultError, match="disk full while writing") as caught:
        export.run(artifact, out, 4, QUIET)
    assert "starts anew" in caught.value.hint
    assert not list(tmp_path.glob("out*"))
