"""Checkpoints: every layout gives the same blocks, and damage is refused by name (H03, H06)."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pw.blocks import BlockKey
from pw.errors import ModelError
from pw.models.checkpoint import Checkpoint
from pw.models.layered import LayeredModel
from pw.models.skeleton import load_skeleton
from pw.models.testing import make_checkpoint
from support.layouts import Tensors, mixed, per_expert, rewrite, with_infix, with_suffix
from support.patience import allowed


def blocks(folder: Path) -> dict[BlockKey, Tensor]:
    checkpoint = Checkpoint.open(folder)
    return {key: checkpoint.expert_weight(key) for key in checkpoint.geometry.keys()}


@pytest.mark.parametrize("kind", ["qwen2_moe_norm", "mixtral", "gemma4", "gpt_oss", "granitemoe"])
def test_blocks_are_the_weights_of_the_model(kind: str, tmp_path: Path) -> None:
    model = make_checkpoint(kind, tmp_path, dtype=torch.bfloat16)
    named = dict(model.named_modules())
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.weight_dtype == torch.bfloat16
    inner = "model.language_model." if kind == "gemma4" else "model."
    for name, layer in checkpoint.architecture.experts.items():
        module = named[name.replace("model.", inner, 1)]
        gate_up, down = module.gate_up_proj, module.down_proj
        if module.is_transposed:
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        if not module.is_concatenated:
            gate_up = torch.cat((gate_up[:, ::2], gate_up[:, 1::2]), 1)
        for expert in range(checkpoint.geometry.experts):
            assert torch.equal(
                checkpoint.expert_weight(BlockKey(layer, expert, "gate_up")), gate_up[expert]
            )
            assert torch.equal(
                checkpoint.expert_weight(BlockKey(layer, expert, "down")), down[expert]
            )


def test_biases_have_the_rows_of_their_blocks(tmp_path: Path) -> None:
    model = make_checkpoint("gpt_oss", tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    module = model.model.layers[1].mlp.experts
    bias = checkpoint.expert_bias(BlockKey(1, 4, "gate_up"))
    assert bias is not None
    assert torch.equal(bias[:24], module.gate_up_proj_bias[4, ::2])
    assert torch.equal(bias[24:], module.gate_up_proj_bias[4, 1::2])
    skeleton = load_skeleton(checkpoint, torch.float32)
    gate_up, down = skeleton.biases[1]
    assert gate_up is not None
    assert down is not None
    assert torch.equal(gate_up[4], bias)
    assert torch.equal(down, module.down_proj_bias)


@pytest.mark.parametrize("change", [with_suffix, with_infix, per_expert, mixed])
def test_all_spellings_of_fused_experts_give_the_same_blocks(
    change: Callable[[Tensors], Tensors], tmp_path: Path
) -> None:
    make_checkpoint("gemma4", tmp_path)
    expected = blocks(tmp_path)
    rewrite(tmp_path, change)
    found = blocks(tmp_path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_dense_keys_and_bytes_are_those_of_the_files(tmp_path: Path) -> None:
    make_checkpoint("mixtral", tmp_path, dtype=torch.bfloat16, max_shard_size="20KB")
    tensors: Tensors = {}
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    for file in files:
        tensors |= load_file(file)
    checkpoint = Checkpoint.open(tmp_path)
    assert set(checkpoint.dense_keys()) == {key for key in tensors if ".experts." not in key}
    for key in checkpoint.dense_keys():
        value = checkpoint.read(key)
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, tensors[key])
    expected = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files}
    config = hashlib.sha256((tmp_path / "config.json").read_bytes()).hexdigest()
    assert checkpoint.fingerprint() == expected | {"config.json": config}


def test_an_artifact_folder_opens_without_experts(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "artifact"
    make_checkpoint("gemma4", source)
    checkpoint = Checkpoint.open(source)
    target.mkdir()
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(
        {key: checkpoint.read(key) for key in checkpoint.dense_keys()},
        target / "dense.safetensors",
    )
    artifact = Checkpoint.open(target)
    assert not artifact.has_experts
    assert artifact.geometry == checkpoint.geometry
    assert artifact.dense_keys() == checkpoint.dense_keys()
    assert load_skeleton(artifact, torch.float32).dense_bytes > 0
    with pytest.raises(ModelError, match="no routed experts"):
        LayeredModel(artifact, torch.float32, torch.device("cpu"), 0)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    make_checkpoint("mixtral", tmp_path, max_shard_size="40KB")
    return tmp_path


def shard_of(folder: Path, name: str) -> Path:
    index = json.loads((folder / "model.safetensors.index.json").read_bytes())
    return folder / str(index["weight_map"][name])


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n"
EXPERT = "model.layers.1.block_sparse_moe.experts.2.w3.weight"


def refusal(folder: Path) -> str:
    start = time.monotonic()
    with pytest.raises(ModelError) as caught:
        Checkpoint.open(folder)
    assert time.monotonic() - start < allowed(2)
    assert caught.value.hint
    return caught.value.message


def test_a_missing_shard_is_named_with_its_tensors(sharded: Path) -> None:
    shard = shard_of(sharded, EXPERT)
    shard.unlink()
    message = refusal(sharded)
    assert f"shard is missing: `{shard.name}`" in message
    assert "model.layers." in message


def test_a_missing_shard_is_found_without_an_index(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    assert refusal(sharded) == f"shard is missing: `{shard.name}`"


def test_a_renamed_shard_is_missing(sharded: Path) -> None:
    shard = shard_of(sharded, EXPERT)
    shard.rename(sharded / "other.safetensors")
    assert f"shard is missing: `{shard.name}`" in refusal(sharded)


def test_a_truncated_shard_is_named_with_the_tensors_cut_off(sharded: Path) -> None:
    shard = shard_of(sharded, EXPERT)
    data = shard.read_bytes()
    shard.write_bytes(data[:-1])
    message = refusal(sharded)
    assert f"`{shard.name}` has {len(data) - 1} of {len(data)} bytes" in message
    shard.write_bytes(data[:100])
    assert f"not a readable safetensors file: `{shard.name}`" in refusal(sharded)
    shard.write_bytes(b"")
    assert f"not a readable safetensors file: `{shard.name}`" in refusal(sharded)


def test_a_swapped_shard_lacks_what_the_index_names(sharded: Path) -> None:
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    second.write_bytes(first.read_bytes())
    assert f"shard `{second.name}` does not hold" in refusal(sharded)


def test_an_index_may_not_leave_its_folder(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "../model.safetensors"}}))
    assert "outside its folder" in refusal(sharded)


def drop(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {k: v for k, v in tensors.items() if k != name}


def test_a_lacking_expert_is_counted_and_named(tmp_path: Path) -> None:
    make_checkpoint("mixtral", tmp_path)
    rewrite(tmp_path, drop(EXPERT))
    message = refusal(tmp_path)
    assert "expected 24 expert blocks, found 23" in message
    assert "`layer 1 expert 2 gate_up`" in message


def test_a_lacking_dense_tensor_is_named(tmp_path: Path) -> None:
    make_checkpoint("mixtral", tmp_path)
    rewrite(tmp_path, drop("model.layers.1.self_attn.o_proj.weight"))
    message = refusal(tmp_path)
    assert "lacks 1 tensors of the model: `model.layers.1.self_attn.o_proj.weight`" in message


def test_a_head_that_is_not_tied_must_be_there(tmp_path: Path) -> None:
    make_checkpoint("mixtral", tmp_path, tie_word_embeddings=False)
    rewrite(tmp_path, drop("lm_head.weight"))
    assert "lacks 1 tensors of the model: `lm_head.weight`" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        (EXPERT, torch.zeros(23, 32), "is F32 [23, 32], expected [24, 32]"),
        (EXPERT, torch.zeros(24, 32, dtype=torch.int8), "is I8 [24, 32], expected"),
        (EXPERT, torch.zeros(24, 32).half(), "differ in dtype: F16 (`model.layers.1.block"),
        ("model.norm.weight", torch.zeros(31), "shape of `model.norm.weight` is [31]"),
    ],
)
def test_wrong_shapes_and_dtypes_are_refused(
    name: str, value: Tensor, expected: str, tmp_path: Path
) -> None:
    make_checkpoint("mixtral", tmp_path)
    rewrite(tmp_path, lambda tensors: tensors | {name: value})
    assert expected in refusal(tmp_path)


def test_packed_weights_of_other_quantizers_are_refused(tmp_path: Path) -> None:
    """Also where only the weights tell, as in old GPTQ checkpoints."""
    make_checkpoint("mixtral", tmp_path)
    packed = EXPERT.replace(".weight", ".qweight")
    rewrite(tmp_path, lambda tensors: drop(EXPERT)(tensors) | {packed: torch.zeros(4).int()})
    assert refusal(tmp_path) == f"its weights are already quantized: `{packed}`"


@pytest.mark.parametrize("name", ["config.json", "*.index.json", "model-00002-*.safetensors"])
def test_a_git_lfs_pointer_is_told_apart(sharded: Path, name: str) -> None:
    [file] = sharded.glob(name)
    file.write_bytes(POINTER)
    with pytest.raises(ModelError, match=f"a git-lfs pointer to it: `{file}`") as caught:
        Checkpoint.open(sharded)
    assert f"`git -C {sharded} lfs pull`" in caught.value.hint


def test_other_formats_are_refused(tmp_path: Path) -> None:
    make_checkpoint("mixtral", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert "no safetensors weights" in refusal(tmp_path)
    assert "`pytorch_model.bin`" in refusal(tmp_path)
