"""Random weights in the shape and layout of a real model, to measure the offline stages at scale.

Layer by layer, so a model of any size takes the memory of one layer. Run it with
`python -m pw_pipelines.synthetic qwen1.5-moe-a2.7b FOLDER [--layers N]`.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from pw.models.architecture import text_model
from pw.models.experts import NAME as EXPERTS
from pw.models.experts import layer_of
from pw.models.geometry import PROBE
from pw.models.resolve import resolve_model
from pw_pipelines.shard_writer import ShardWriter, original_names

_STANDARD_DEVIATION = 0.02
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")

SHAPES: dict[str, dict[str, Any]] = {
    "qwen1.5-moe-a2.7b": {
        "model_type": "qwen2_moe", "hidden_size": 2048, "num_hidden_layers": 24,
        "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 151936,
        "intermediate_size": 5632, "moe_intermediate_size": 1408, "num_experts": 60,
        "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4,
        "norm_topk_prob": False, "max_position_embeddings": 8192,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
        "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2,
        "max_position_embeddings": 32768, "sliding_window": None,
    },
    "gemma-4-26b-a4b": {
        "model_type": "gemma4_text", "hidden_size": 2816, "num_hidden_layers": 30,
        "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 262144,
        "intermediate_size": 2112, "moe_intermediate_size": 704, "num_experts": 128,
        "top_k_experts": 8, "enable_moe_block": True, "head_dim": 256, "global_head_dim": 512,
        "num_global_key_value_heads": 2, "attention_k_eq_v": True, "sliding_window": 1024,
        "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "vocab_size": 151936, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "max_position_embeddings": 40960,
    },
}  # fmt: skip


def write(settings: dict[str, Any], out: Path, *, seed: int = 0, device: str = "cpu") -> int:
    """Write a random bf16 checkpoint with the bundled model's tokenizer; gives its bytes.

    Args:
        settings: Of the config, e.g. one of `SHAPES`.
        out: Folder to make.
        seed: Of the weights.
        device: Where random numbers are made.
    """
    out.mkdir(parents=True)
    config: Any = AutoConfig.for_model(**settings, dtype="bfloat16")
    with torch.device("meta"):
        model: Any = text_model(config, torch.bfloat16, attention=PROBE, experts=EXPERTS)
    config.architectures = [type(model).__name__]
    config.save_pretrained(out)
    for name in _TOKENIZER:
        shutil.copyfile(resolve_model("tiny") / name, out / name)
    groups = _by_layer(model)
    generator = torch.Generator(device).manual_seed(seed)
    total = sum(tensor.nbytes for group in groups for tensor in group.values())
    writer = ShardWriter(out, len(groups), total)
    for group in groups:
        made = {name: _random(name, meta, generator) for name, meta in group.items()}
        writer.write(original_names(model, made))
    writer.write_index()
    return writer.bytes


def _by_layer(model: Any) -> list[dict[str, Tensor]]:
    """Tensors of the model on meta: those of no layer, then each layer's."""
    groups: dict[int, dict[str, Tensor]] = {}
    for name, tensor in model.state_dict().items():
        if name not in model.all_tied_weights_keys:
            layer = layer_of(name) if ".layers." in name else -1
            groups.setdefault(layer, {})[name] = tensor
    return [groups[layer] for layer in sorted(groups)]


def _random(name: str, meta: Tensor, generator: torch.Generator) -> Tensor:
    """A matrix is random, a vector neutral: 0 for a bias, else 1."""
    if meta.dim() < 2:
        value = 0.0 if name.endswith("bias") else 1.0
        return torch.full(meta.shape, value, dtype=meta.dtype)
    made = torch.empty(meta.shape, dtype=meta.dtype, device=generator.device)
    return made.normal_(0.0, _STANDARD_DEVIATION, generator=generator).cpu()


def main() -> None:
    """Write the checkpoint that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, help="fewer layers than the real model")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    settings = dict(SHAPES[given.shape])
    if given.layers is not None:
        settings["num_hidden_layers"] = given.layers
        if "layer_types" in settings:
            settings["layer_types"] = settings["layer_types"][-given.layers :]
    print(f"{given.folder}: {write(settings, given.folder, device=given.device):,} bytes")


if __name__ == "__main__":
    main()
