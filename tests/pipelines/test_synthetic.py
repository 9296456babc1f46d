"""Checkpoints of random weights: whole, in the original layout, of the shape they are named for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pw.config import CalibrationConfig
from pw.models.architecture import Architecture
from pw.models.checkpoint import Checkpoint
from pw.models.resolve import resolve_model
from pw.models.shards import ShardIndex
from pw.models.tokenizer import load_tokenizer
from pw_pipelines.calibration import calibration_set
from pw_pipelines.synthetic import write, write_text

CONFIGS = Path(__file__).parents[2] / "pipelines" / "recipes" / "configs"
SHAPES = {path.stem: json.loads(path.read_text()) for path in sorted(CONFIGS.glob("*.json"))}
BILLIONS = {
    "qwen1.5-moe-a2.7b": (14.32, 23.2),
    "mixtral-8x7b": (46.70, 84.0),
    "gemma-4-26b-a4b": (25.23, 42.5),
    "qwen3-30b-a3b": (30.53, 54.0),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_has_the_real_models_parameters(shape: str, tmp_path: Path) -> None:
    assert SHAPES.keys() == BILLIONS.keys()
    config = AutoConfig.for_model(**SHAPES[shape])
    config.save_pretrained(tmp_path)
    found = Architecture.load(tmp_path)
    parameters, experts = BILLIONS[shape]
    assert sum(p.numel() for p in found.meta.parameters()) / 1e9 == pytest.approx(
        parameters, abs=0.01
    )
    assert found.geometry.weights * 2 / 2**30 == pytest.approx(experts, abs=0.1)


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_written_is_a_checkpoint(shape: str, tmp_path: Path) -> None:
    settings = SHAPES[shape] | {
        "num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 4096, "intermediate_size": 24,
        "moe_intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2,
        "head_dim": 16,
    }  # fmt: skip
    settings.pop("layer_types", None)
    if shape == "gemma-4-26b-a4b":
        settings["layer_types"] = ["sliding_attention", "full_attention"]
    size = write(settings, tmp_path / "model")
    shards = ShardIndex.open(tmp_path / "model")
    checkpoint = Checkpoint.open(tmp_path / "model")
    assert len(shards.files) == 3
    assert checkpoint.weight_dtype == torch.bfloat16
    assert size == sum(shards.entry(n).stop - shards.entry(n).start for n in shards.keys())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    model.save_pretrained(tmp_path / "again")
    assert ShardIndex.open(tmp_path / "again").keys() == shards.keys()


def test_random_text_gives_all_samples_that_are_asked_for(tmp_path: Path) -> None:
    write_text(tmp_path / "text.jsonl", 3, 50)
    config = CalibrationConfig(str(tmp_path / "text.jsonl"), 3, 50)
    found = calibration_set(config, load_tokenizer(resolve_model("tiny")))
    assert found.windows.shape == (3, 50)
    assert found.available >= 3
