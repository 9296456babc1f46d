"""Which models are served, which are refused with what reason, and what the probe finds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from pw.blocks import BlockShape, ExpertGeometry
from pw.errors import ModelError
from pw.models.architecture import Architecture
from pw.models.geometry import KvLayer
from pw.models.resolve import resolve_model
from pw.models.testing import make_model


def write_config(folder: Path, settings: dict[str, Any]) -> Path:
    AutoConfig.for_model(**settings).save_pretrained(folder)
    return folder


def small(model_type: str, **settings: Any) -> dict[str, Any]:
    return {
        "model_type": model_type, "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
    } | settings  # fmt: skip


def test_bundled_model_has_the_shapes_of_its_card() -> None:
    found = Architecture.load(resolve_model("tiny"))
    assert found.geometry == ExpertGeometry(
        (0, 1, 2, 3), 8, 2, BlockShape(256, 256), BlockShape(256, 128)
    )
    assert found.geometry.weights == 3_145_728
    assert found.probe.kv.bytes_per_token(torch.bfloat16) == 4096
    assert found.probe.kv.layers[3] == KvLayer(3, 4, 64, 64, None, 3)


def test_layers_may_differ_in_heads_windows_and_sources(tmp_path: Path) -> None:
    make_model("gemma4_shared").config.save_pretrained(tmp_path)
    kv = Architecture.load(tmp_path).probe.kv
    assert [layer.window for layer in kv.layers] == [6, None, 6, None]
    assert [layer.source for layer in kv.layers] == [0, 1, 2, 1]
    assert [layer.k_dim for layer in kv.layers] == [8, 16, 8, 16]
    assert [layer.layer for layer in kv.stored] == [0, 1, 2]
    assert kv.bytes_per_token(torch.float32) == 4 * 2 * 2 * (8 + 16 + 8)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (small("llama"), "`llama`: no routed experts"),
        (small("bamba", mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=1), "`bamba`"),
        (
            small("qwen3_next", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
                  linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8,
                  linear_value_head_dim=8, head_dim=8, shared_expert_intermediate_size=16),
            "`qwen3_next`: layers [0, 1] keep state outside attention",
        ),
        (
            small("phimoe", num_local_experts=4, rope_parameters={
                "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4, "original_max_position_embeddings": 64,
                "short_mscale": 1.0, "long_mscale": 1.0}),
            "`phimoe`: rope type `longrope`",
        ),
    ],
    ids=["dense", "mamba", "linear-attention", "longrope"],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_by_name_and_reason(
    settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as caught:
        Architecture.load(write_config(tmp_path, settings))
    assert caught.value.message.startswith("model is not supported: ")
    assert reason in caught.value.message
    assert "served are mixture-of-experts models: Qwen2-MoE, " in caught.value.hint


@pytest.mark.parametrize(
    ("config", "reason", "hint"),
    [
        (
            {"model_type": "not_a_model"},
            "`not_a_model`: transformers cannot read its config",
            "served are mixture-of-experts models",
        ),
        (
            {"model_type": "mixtral", "hidden_size": "big"},
            "`mixtral`: transformers cannot read its config: Validation error for field 'hidden_si",
            "correct config.json, or fetch",
        ),
        (
            {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}},
            "`gpt_oss`: its weights are already quantized (mxfp4)",
            "name the unquantized checkpoint",
        ),
        (
            {"model_type": "mixtral", "quantization_config": [4]},
            "`mixtral`: its weights are already quantized (unknown method)",
            "name the unquantized checkpoint",
        ),
        ({"hidden_size": 3}, "(it has no model_type)", "correct config.json, or fetch"),
        ([], "(it has no model_type)", "correct config.json, or fetch"),
    ],
)
def test_configs_that_cannot_be_read_are_refused(
    config: Any, reason: str, hint: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError) as caught:
        Architecture.load(tmp_path)
    assert reason in caught.value.message
    assert hint in caught.value.hint
    assert len(caught.value.message) < 200


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b"[" * 100_000])
def test_a_config_that_is_no_json_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"not a readable model config: `.*config.json`") as caught:
        Architecture.load(tmp_path)
    assert caught.value.hint


def test_no_code_of_a_checkpoint_is_run(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit(9)\n")
    settings = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.C"}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match="`evil`"):
        Architecture.load(tmp_path)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config.json"):
        Architecture.load(tmp_path)


def test_a_norm_flag_that_is_not_stated_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_model("qwen2_moe").config.save_pretrained(tmp_path)
    Architecture.load(tmp_path)
    assert not caplog.text
    file = tmp_path / "config.json"
    settings = json.loads(file.read_bytes())
    settings.pop("norm_topk_prob")
    file.write_text(json.dumps(settings))
    found = Architecture.load(tmp_path)
    assert found.config.norm_topk_prob is False
    assert "using the default of `qwen2_moe`: False" in caplog.text
