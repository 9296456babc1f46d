"""A model of random weights in the shape of a config: for load tests where there is no checkpoint.

Nothing is written but a small folder with the config and a tokenizer that stands in for the
model's own: bytes for what is put in, a number for every other token that may come out.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from pw.blocks import ExpertGeometry
from pw.errors import ConfigError
from pw.models.architecture import Architecture
from pw.models.attention import NAME as ATTENTION
from pw.models.experts import NAME as EXPERTS
from pw.models.experts import expert_modules
from pw.models.skeleton import Skeleton, build, finish

STANDARD_DEVIATION = 0.02  # of random weights, as models are initialized
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_CHAT = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_folder(config: Path, out: Path, overrides: Mapping[str, Any]) -> None:
    """Write the folder that stands for a model: its config and a tokenizer.

    Args:
        config: A config.json; a tokenizer beside it is taken along.
        out: Folder to make, or to fill again.
        overrides: Keys of the (text) config to change, like `num_hidden_layers`.

    Raises:
        ConfigError: The file is no config, or has no such key.
    """
    settings = _overridden(config, overrides)
    out.mkdir(parents=True, exist_ok=True)
    text = settings.get("text_config", settings)
    if (config.parent / _TOKENIZER_FILES[0]).is_file():
        for name in _TOKENIZER_FILES:
            if (config.parent / name).is_file():
                shutil.copyfile(config.parent / name, out / name)
    else:
        stand_in_tokenizer(int(text["vocab_size"])).save_pretrained(out)
    (out / "config.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")


def _overridden(config: Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    try:
        settings: dict[str, Any] = json.loads(config.read_text("utf-8"))
        text: dict[str, Any] = settings.get("text_config", settings)
        text["vocab_size"] = int(text["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"not a model config with a vocab_size: `{config}`") from error
    if unknown := sorted(set(overrides) - set(text)):
        raise ConfigError(f"the config has no `{unknown[0]}` to override: `{config}`")
    text.update(overrides)
    layers = text.get("num_hidden_layers")
    if "num_hidden_layers" in overrides and "layer_types" in text:
        text["layer_types"] = text["layer_types"][-int(layers or 0) :]
    return settings


def stand_in_tokenizer(vocabulary: int) -> Any:
    """A tokenizer of transformers with so many tokens: the bytes, then ` 256`, ` 257`, ..."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *(f"Ġ{number}" for number in range(len(alphabet), vocabulary))]
    table = {token: number for number, token in enumerate(tokens[:vocabulary])}
    tokenizer = Tokenizer(models.BPE(vocab=table, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    made: Any = PreTrainedTokenizerFast
    return made(tokenizer_object=tokenizer, chat_template=_CHAT)


def random_skeleton(
    architecture: Architecture, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> Skeleton:
    """Dense weights made on the device: matrices are random, vectors neutral."""
    model = build(architecture, dtype, attention=ATTENTION, experts=EXPERTS)
    generator = torch.Generator(device).manual_seed(seed)
    experts = {name for name, _ in expert_modules(model)}
    for name, module in model.named_modules():
        for leaf, parameter in module._parameters.items():
            made_elsewhere = name in experts and leaf.endswith("_proj")
            if parameter is not None and parameter.is_meta and not made_elsewhere:
                value = random_weight(leaf, parameter, generator)
                module._parameters[leaf] = nn.Parameter(value, requires_grad=False)
        for leaf, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[leaf] = buffer.to(device)
    model.tie_weights()
    return finish(model, architecture, dtype, device)


def random_weight(name: str, like: Tensor, generator: torch.Generator) -> Tensor:
    """A matrix is random, a vector neutral: 0 for a bias, else 1."""
    made = torch.empty(like.shape, dtype=like.dtype, device=generator.device)
    if like.dim() < 2:
        return made.fill_(0.0 if name.endswith("bias") else 1.0)
    return made.normal_(0.0, STANDARD_DEVIATION, generator=generator)


def random_experts(
    geometry: ExpertGeometry, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> list[tuple[Tensor, Tensor]]:
    """Unquantized experts of every MoE layer: [E, 2I, H] and [E, H, I]."""
    generator = torch.Generator(device).manual_seed(seed)

    def make(rows: int, cols: int) -> Tensor:
        made = torch.empty(geometry.experts, rows, cols, dtype=dtype, device=device)
        return made.normal_(0.0, STANDARD_DEVIATION, generator=generator)

    up, down = geometry.gate_up, geometry.down
    return [(make(up.rows, up.cols), make(down.rows, down.cols)) for _ in geometry.layers]
