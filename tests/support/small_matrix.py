"""A comparison of policies that a CPU makes in a second: the model, the settings, the cells."""

from __future__ import annotations

import json
from pathlib import Path

from pw.config import EngineConfig
from pw.evaluation.bench.matrix import Matrix
from pw.models.stand_in import write_folder

LAYERS, HIDDEN, INNER, EXPERTS, TOP_K, HEADS = 2, 64, 48, 6, 2, 2
CONFIG = EngineConfig(memory_budget=48 << 20, device="cpu", load_format="dummy", max_num_seqs=4)
SMALL = Matrix(
    policies=("dense", "held:3", "static:3", "adaptive:3"),
    batches=(1, 4),
    contexts=(48,),
    steps=3,
)


def write_model(root: Path) -> Path:
    """The folder that stands for random weights."""
    settings = {
        "model_type": "qwen2_moe", "hidden_size": HIDDEN, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "vocab_size": 600,
        "intermediate_size": 64, "num_experts": EXPERTS, "moe_intermediate_size": INNER,
        "num_experts_per_tok": TOP_K, "shared_expert_intermediate_size": 64,
        "max_position_embeddings": 512, "norm_topk_prob": False,
    }  # fmt: skip
    (root / "small.json").write_text(json.dumps(settings))
    write_folder(root / "small.json", root / "model", {})
    return root / "model"
