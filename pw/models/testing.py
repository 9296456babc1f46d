"""Tiny random checkpoints and plain torch counterparts, for tests of whatever stands above.

The checkpoints are written by transformers itself in each architecture's original layout.

Axes: T tokens, B sequences, P pages, Hq query heads, Hkv key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from pw.blocks import BlockKey, Module
from pw.models.checkpoint import Checkpoint
from pw.models.dense import TorchExperts
from pw.models.experts import activation_of, expert_modules

_COMMON: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 97,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.25,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_QWEN2: dict[str, Any] = {
    "model_type": "qwen2_moe", "num_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "intermediate_size": 48,
}  # fmt: skip
_GEMMA4: dict[str, Any] = {
    "model_type": "gemma4_text", "num_hidden_layers": 4, "num_experts": 5, "top_k_experts": 2,
    "enable_moe_block": True, "moe_intermediate_size": 11, "intermediate_size": 40, "head_dim": 8,
    "global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    "sliding_window": 6, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
}  # fmt: skip
_SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_moe": _QWEN2,
    "qwen2_moe_norm": _QWEN2 | {"norm_topk_prob": True, "mlp_only_layers": [1]},
    "qwen2_moe_window": _QWEN2
    | {"use_sliding_window": True, "sliding_window": 6, "layer_types": _SLIDING},
    "mixtral": {
        "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
        "intermediate_size": 24, "sliding_window": 6,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 3, "head_dim": 8,
        "moe_intermediate_size": 24, "intermediate_size": 48, "norm_topk_prob": True,
    },
    "olmoe": {
        "model_type": "olmoe", "num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24,
    },
    "gemma4_text": _GEMMA4,
    "gemma4_shared": _GEMMA4
    | {"num_kv_shared_layers": 1, "hidden_size_per_layer_input": 8, "attention_k_eq_v": False,
       "vocab_size_per_layer_input": 97,
       "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gpt_oss": {
        "model_type": "gpt_oss", "num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 8,
        "intermediate_size": 24, "sliding_window": 6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "granitemoe": {
        "model_type": "granitemoe", "num_local_experts": 5, "num_experts_per_tok": 2,
        "intermediate_size": 24,
    },
    "glm4_moe": {
        "model_type": "glm4_moe", "n_routed_experts": 6, "num_experts_per_tok": 2, "head_dim": 8,
        "moe_intermediate_size": 24, "intermediate_size": 48, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "n_shared_experts": 1, "use_qk_norm": True,
    },
    "deepseek_v2": {
        "model_type": "deepseek_v2", "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2,
        "topk_group": 1, "moe_intermediate_size": 24, "intermediate_size": 48, "q_lora_rank": 16,
        "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12,
        "first_k_dense_replace": 1, "num_key_value_heads": 4, "n_shared_experts": 1,
        "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3", "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2,
        "topk_group": 1, "moe_intermediate_size": 24, "intermediate_size": 48, "q_lora_rank": 16,
        "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12,
        "first_k_dense_replace": 1, "num_key_value_heads": 4, "n_shared_experts": 1,
    },
}  # fmt: skip
_GEMMA4_VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "position_embedding_size": 8,
}  # fmt: skip
KINDS = (*CONFIGS, "gemma4")  # the last is a multimodal checkpoint around gemma4_text


def make_model(kind: str, seed: int = 0, **overrides: Any) -> Any:
    """A random model in fp32; every parameter and buffer differs from its initial constant.

    Args:
        kind: One of `KINDS`.
        seed: Of the weights.
        overrides: Further settings of the (text) config.
    """
    settings = _COMMON | CONFIGS["gemma4_text" if kind == "gemma4" else kind] | overrides
    if kind == "gemma4":
        from transformers import Gemma4Config, Gemma4ForConditionalGeneration

        config: Any = Gemma4Config(
            text_config=settings, vision_config=_GEMMA4_VISION, audio_config=None
        )
        factory: Any = Gemma4ForConditionalGeneration._from_config
    else:
        config = AutoConfig.for_model(**settings)
        factory = AutoModelForCausalLM.from_config
    with torch.random.fork_rng(devices=[]):  # the weights are made on the CPU
        torch.manual_seed(seed)
        model = factory(config, attn_implementation="eager", experts_implementation="eager").eval()
        with torch.no_grad():
            for tensor in model.state_dict().values():
                if tensor.dtype.is_floating_point and tensor.dim() == 1:
                    tensor.add_(torch.rand_like(tensor) - 0.5)
    return model


def make_checkpoint(
    kind: str,
    folder: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Any:
    """Write a random checkpoint below `folder`; returns the model it was written from."""
    model = make_model(kind, seed, **overrides).to(dtype)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def streamed_experts(model: Any, checkpoint: Checkpoint, dtype: torch.dtype) -> TorchExperts:
    """Plain torch experts to bind to `model`; each weight is read from disk when it is used."""
    modules: list[Any] = [module for _, module in expert_modules(model)]
    layers = checkpoint.geometry.layers

    def weight(slot: int, expert: int, block: Module, device: torch.device) -> Tensor:
        return checkpoint.expert_weight(BlockKey(layers[slot], expert, block)).to(device, dtype)

    def bias(slot: int, expert: int, block: Module) -> Tensor | None:
        found = checkpoint.expert_bias(BlockKey(layers[slot], expert, block))
        return None if found is None else found.to(dtype)

    return TorchExperts(weight, bias, [activation_of(module) for module in modules])


class PlainContext:
    """Attention context in plain torch: keys and values kept per layer and sequence, unpaged."""

    def __init__(self) -> None:
        self.chunks: list[tuple[int, int]] = []
        self._keys: dict[tuple[int, int], Tensor] = {}  # (layer, sequence) -> [L, Hkv, D]
        self._values: dict[tuple[int, int], Tensor] = {}

    def begin(self, chunks: Sequence[tuple[int, int]]) -> None:
        """Start a step: (sequence, number of new tokens) of each chunk of the packed batch."""
        self.chunks = list(chunks)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        write: bool,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """See `pw.models.attention.AttentionContext`."""
        outs, start = [], 0
        for sequence, count in self.chunks:
            rows = slice(start, start + count)
            start += count
            if write:
                self._store(layer, sequence, k[rows], v[rows])
            keys, values = self._keys[layer, sequence], self._values[layer, sequence]
            outs.append(_attention(q[rows], keys, values, scale, window, softcap, sinks))
        return torch.cat(outs)

    def _store(self, layer: int, sequence: int, k: Tensor, v: Tensor) -> None:
        for table, new in ((self._keys, k), (self._values, v)):
            old = table.get((layer, sequence))
            table[layer, sequence] = new.clone() if old is None else torch.cat((old, new))


def _attention(
    q: Tensor,  # [T, Hq, D], the last T positions
    k: Tensor,  # [L, Hkv, D]
    v: Tensor,  # [L, Hkv, Dv]
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:  # [T, Hq, Dv]
    groups = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(groups, 1).float() for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    length = k.shape[0]
    position = torch.arange(length - q.shape[0], length)[:, None]
    visible = torch.arange(length) <= position
    if window:
        visible &= torch.arange(length) > position - window
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        column = sinks.float()[:, None, None].expand(-1, q.shape[0], 1)
        scores = torch.cat((scores, column), -1)
    weights = scores.softmax(-1)[..., :length]
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
