"""Faults that users of other systems met (H01 to H07), and odd checkpoints, on ours.

H03 and H06 have more forms in `tests/models/test_checkpoint.py`.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pw.blocks import MODULES, BlockKey
from pw.config import QuantizeConfig
from pw.errors import ModelError, StoreError
from pw.models.checkpoint import Checkpoint
from pw.models.dense import ExpertObserver
from pw.models.dequantized import DequantizedBlocks
from pw.models.testing import make_checkpoint
from pw.store.artifact import Artifact
from pw.store.planes import LUTS, PLANES
from pw_pipelines import dry_run, quantize
from pw_pipelines.moments import Coverage, Moments, measure_moments, report_coverage
from pw_pipelines.observation import ObservedModel
from pw_pipelines.progress import Progress, Style
from support.engines import open_engine, random_prompt
from support.layouts import Tensors, mixed, per_expert, rewrite, with_infix, with_suffix
from support.logprobs import engine_logprobs, model_logprobs
from support.offline import QUIET, VOCABULARY, calibration, random_checkpoint, write_tokenizer

T_Q: dict[str, Any] = {"num_experts": 60, "num_experts_per_tok": 4, "num_hidden_layers": 2}
T_M: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 2}
T_G: dict[str, Any] = {"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 88}
CPU = torch.device("cpu")


def quantized(folder: Path, nsamples: int = 8, max_bits: int = 3) -> Artifact:
    """The artifact of the checkpoint in `folder / "model"`."""
    config = QuantizeConfig(max_bits=max_bits, calibration=calibration(folder, nsamples))
    quantize.run(str(folder / "model"), folder / "a.pw", config, QUIET)
    return Artifact.open(folder / "a.pw")


def save(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    write_tokenizer(folder)


def close_router(model: Any, experts: list[int]) -> None:
    """Keep tokens from some experts: one hidden unit is large in every token, and repels them."""
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(20)  # tokens differ more than attention mixes them
        model.model.embed_tokens.weight[:, 0] = 30.0
        for layer in model.model.layers:
            layer.post_attention_layernorm.weight[0] = 1.0
            layer.mlp.gate.weight[:, 0] = 0.0
            layer.mlp.gate.weight[experts, 0] = -1e9


def test_h01_experts_without_a_calibration_token_fall_back_and_serve(tmp_path: Path) -> None:
    model = random_checkpoint(tmp_path / "model", "qwen2_moe", **T_Q)
    dead = [3, 26, 59]
    close_router(model, dead)
    save(model, tmp_path / "model")
    artifact = quantized(tmp_path, nsamples=32)
    moments = Moments.from_arrays(artifact.table("moments").arrays)
    found = moments.coverage == Coverage.DEAD
    assert found[:, dead].all()
    assert found.sum() < 40  # of 120: text of a few letters leaves some more out
    assert (moments.tokens.sum(1) == 4 * 32 * 64).all()
    assert np.isfinite(moments.gate_up).all()
    assert artifact.manifest.stages["quantize"].report["coverage"]["dead"] == found.sum()
    blocks, checkpoint = DequantizedBlocks(artifact, CPU), Checkpoint.open(tmp_path / "model")
    # Fitted under the layer's moments (gate_up), or as if all columns counted the same (down).
    for key, share in ((BlockKey(0, 3, "gate_up"), 0.2), (BlockKey(1, 59, "down"), 0.06)):
        weight = checkpoint.expert_weight(key).float()
        error = (blocks.weight(key, 3) - weight).square().sum()
        assert error < share * weight.square().sum()
    engine = open_engine(artifact.path, "static:3")
    assert torch.isfinite(engine_logprobs(engine)).all()


def test_h02_router_and_shared_gate_keep_their_bytes(tmp_path: Path) -> None:
    random_checkpoint(tmp_path / "model", "qwen2_moe", dtype=torch.bfloat16, **T_Q)
    artifact = quantized(tmp_path, nsamples=32)
    source, copy = Checkpoint.open(tmp_path / "model"), Checkpoint.open(artifact.path)
    shapes = set()
    for name in source.dense_keys():
        tensor = copy.read(name)
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, source.read(name))
        shapes.add((name.split(".", 3)[-1], tuple(tensor.shape)))
    assert {("mlp.gate.weight", (60, 32)), ("mlp.shared_expert_gate.weight", (1, 32))} <= shapes


def test_h03_all_forms_of_fused_experts_give_one_artifact(tmp_path: Path) -> None:
    forms: dict[str, Callable[[Tensors], Tensors]] = {
        "fused": lambda tensors: tensors,
        "suffix": with_suffix,
        "infix": with_infix,
        "split": per_expert,
        "mixed": mixed,
    }
    digests = {}
    for name, change in forms.items():
        random_checkpoint(tmp_path / name / "model", "gemma4")
        rewrite(tmp_path / name / "model", change)
        manifest = quantized(tmp_path / name).manifest
        digests[name] = {group: manifest.group_digest(group) for group in (PLANES, LUTS)}
    assert all(digest == digests["fused"] for digest in digests.values())

    lost = "layers.2.experts.4.up_proj.weight"
    rewrite(
        tmp_path / "split" / "model",
        lambda tensors: {k: v for k, v in tensors.items() if not k.endswith(lost)},
    )
    message = "expected 40 expert blocks, found 39: missing `layer 2 expert 4 gate_up`"
    with pytest.raises(ModelError, match=message):
        quantized(tmp_path / "split")


@pytest.mark.parametrize("inner", [37, 88, 704, 1408])
def test_h04_any_inner_width_is_padded_and_served(inner: int, tmp_path: Path) -> None:
    model = random_checkpoint(
        tmp_path / "model", "gemma4", num_hidden_layers=1, moe_intermediate_size=inner,
        num_experts=2, layer_types=["full_attention"],
    )  # fmt: skip
    config = QuantizeConfig(
        max_bits=8, codebook="kmeans", calibration=calibration(tmp_path)
    )  # fitted jointly at all other sizes
    plan = dry_run.run(str(tmp_path / "model"), tmp_path / "a.pw", config)
    assert plan.plan["down"].padded == (32, -(-inner // 128) * 128)
    quantize.run(str(tmp_path / "model"), tmp_path / "a.pw", config, QUIET)
    artifact = Artifact.open(tmp_path / "a.pw")
    got = engine_logprobs(open_engine(artifact.path, "static:8", dtype="float32"))
    assert (got - model_logprobs(model)).abs().mean() < 0.02


def poisoned(folder: Path, samples: list[int]) -> tuple[ObservedModel, Tensor]:
    """A model with a token whose embedding is infinite, and windows of which some hold it."""
    model = make_checkpoint("mixtral", folder, vocab_size=VOCABULARY)
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = torch.inf
    model.save_pretrained(folder)
    generator = torch.Generator().manual_seed(3)
    windows = torch.randint(8, VOCABULARY, (20, 64), generator=generator)
    windows[samples, 5] = 7
    return ObservedModel(Checkpoint.open(folder), "cpu"), windows


def test_h05_rows_that_are_not_finite_are_left_out_and_nothing_else_changes(
    tmp_path: Path,
) -> None:
    model, windows = poisoned(tmp_path, [4])
    kept = torch.cat([windows[:4], windows[5:]])
    with_them = measure_moments(model, windows)
    without = measure_moments(model, kept)
    for name, array in without.arrays().items():
        np.testing.assert_allclose(with_them.arrays()[name], array, rtol=1e-5, err_msg=name)
    told = io.StringIO()
    report_coverage(with_them, Progress(Style.PLAIN, stream=told), strict=False)
    lost = 3 * 64  # all tokens that can see it, and 0 x Inf reaches those that cannot
    assert with_them.dropped == lost
    assert (
        f"warning: {lost} states of tokens, all layers together, were not finite" in told.getvalue()
    )
    assert without.dropped == 0

    model, windows = poisoned(tmp_path, [1, 8, 14])
    with pytest.raises(ModelError, match=r"experts of layer 0 are not finite in \d+ of 2560 rows"):
        measure_moments(model, windows)


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_h06_a_damaged_payload_file_of_an_artifact_is_named(damage: str, tmp_path: Path) -> None:
    random_checkpoint(tmp_path / "model", "mixtral", **T_M)
    artifact = quantized(tmp_path)
    file = artifact.path / PLANES / "1.down" / "c" / "3" / "0" / "0" / "0"
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-9])
    started = time.process_time()
    with pytest.raises(StoreError, match=r"planes\.zarr/1\.down/c/3/0/0/0"):
        open_engine(artifact.path, "static:3")
    assert time.process_time() - started < 2


class Router(ExpertObserver):
    """Keeps what the routers decided."""

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def routed(self, slot: int, inputs: Tensor, ids: Tensor, weights: Tensor) -> None:
        self.seen.append((inputs, ids, weights))


@pytest.mark.parametrize(
    ("kind", "settings", "normalized"),
    [
        ("qwen2_moe", T_Q | {"norm_topk_prob": False}, False),
        ("qwen2_moe", T_Q | {"norm_topk_prob": True}, True),
        ("mixtral", T_M, True),
    ],
)
def test_h07_router_weights_are_normalized_where_the_model_says_so(
    kind: str, settings: dict[str, Any], normalized: bool, tmp_path: Path
) -> None:
    model = random_checkpoint(tmp_path / "model", kind, **settings)
    observed, router = ObservedModel(Checkpoint.open(tmp_path / "model"), "cpu"), Router()
    observed.read(torch.tensor([random_prompt(20, 1)]), [router])
    for layer, (inputs, ids, weights) in zip(model.model.layers, router.seen, strict=True):
        chances = (inputs @ layer.mlp.gate.weight.T).softmax(-1)
        best = chances.topk(ids.shape[1])
        assert torch.equal(best.indices, ids)
        expected = best.values / best.values.sum(1, keepdim=True) if normalized else best.values
        torch.testing.assert_close(weights, expected)
    artifact = quantized(tmp_path, nsamples=32)
    got = engine_logprobs(open_engine(artifact.path, "dense", dtype="float32"))
    torch.testing.assert_close(got, model_logprobs(model), rtol=1e-4, atol=5e-4)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite_are_refused_by_name(value: float, tmp_path: Path) -> None:
    model = random_checkpoint(tmp_path / "model", "qwen2_moe")
    with torch.no_grad():
        model.model.layers[2].mlp.experts.gate_up_proj[5, 30, 7] = value
    save(model, tmp_path / "model")
    with pytest.raises(ModelError, match="weights of layer 2 expert 5 gate_up are not finite"):
        quantized(tmp_path)


def test_weights_beyond_float16_and_rows_without_spread_survive(tmp_path: Path) -> None:
    model = random_checkpoint(tmp_path / "model", "mixtral", dtype=torch.bfloat16, **T_M)
    experts = model.model.layers[1].mlp.experts
    with torch.no_grad():
        experts.down_proj[2, 0, :3] = torch.tensor([1e6, -7e4, 3e5])
        experts.down_proj[3, 5] = 0.125
        experts.gate_up_proj[4] = 0
    save(model, tmp_path / "model")
    artifact = quantized(tmp_path, max_bits=8)
    assert artifact.lut_dtype == torch.bfloat16
    blocks, checkpoint = DequantizedBlocks(artifact, CPU), Checkpoint.open(tmp_path / "model")
    big = blocks.weight(BlockKey(1, 2, "down"), 8)[0]
    exact = checkpoint.expert_weight(BlockKey(1, 2, "down"))[0].float()
    torch.testing.assert_close(big, exact, rtol=1e-2, atol=0.01)
    for bits in blocks.widths:
        assert (blocks.weight(BlockKey(1, 3, "down"), bits)[5] == 0.125).all()
        assert (blocks.weight(BlockKey(1, 4, "gate_up"), bits) == 0).all()
        for module in MODULES:
            assert torch.isfinite(blocks.weight(BlockKey(1, 2, module), bits)).all()


@pytest.mark.parametrize(
    ("experts", "top_k"), [(1, 1), (2, 2), (60, 4), (61, 7), (128, 8), (129, 8)]
)
def test_any_number_of_experts_is_quantized_and_served(
    experts: int, top_k: int, tmp_path: Path
) -> None:
    model = random_checkpoint(
        tmp_path / "model", "qwen3_moe", num_experts=experts, num_experts_per_tok=top_k,
        num_hidden_layers=1,
    )  # fmt: skip
    artifact = quantized(tmp_path, nsamples=40, max_bits=8)
    assert artifact.geometry.blocks == 2 * experts
    got = engine_logprobs(open_engine(artifact.path, "static:8", dtype="float32"))
    assert (got - model_logprobs(model)).abs().mean() < 0.02


def test_a_model_with_zero_experts_is_refused_by_name(tmp_path: Path) -> None:
    config = make_checkpoint("mixtral", tmp_path / "model").config
    config.num_local_experts = 0
    config.save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match="`mixtral`: it has zero routed experts"):
        Checkpoint.open(tmp_path / "model")
