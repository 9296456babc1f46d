"""Random weights in the shape and layout of a real model, to measure the offline stages at scale.

Layer by layer, so a model of any size takes the memory of one layer. Run it with
`python -m pw_pipelines.synthetic pipelines/recipes/configs/mixtral-8x7b.json FOLDER [--layers N]`.
"""

from __future__ import annotations

import argparse
import json
import random
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


def write(settings: dict[str, Any], out: Path, *, seed: int = 0, device: str = "cpu") -> int:
    """Write a random bf16 checkpoint with the bundled model's tokenizer; gives its bytes.

    Args:
        settings: Of the config, as in `pipelines/recipes/configs`.
        out: Folder to make.
        seed: Of the weights.
        device: Where random numbers are made.
    """
    out.mkdir(parents=True)
    config: Any = AutoConfig.for_model(**(settings | {"dtype": "bfloat16"}))
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


def write_text(path: Path, samples: int, length: int) -> None:
    """Write a .jsonl of random words, enough for so many samples of `length` tokens each."""
    letters, draw = "abcdefghijklmnopqrstuvwxyz", random.Random(0)
    with path.open("w") as stream:
        for _ in range(samples):  # a document each; a word takes a token or more
            words = ("".join(draw.choices(letters, k=3)) for _ in range(length))
            stream.write(json.dumps({"text": " ".join(words)}) + "\n")


def fewer_layers(settings: dict[str, Any], layers: int) -> dict[str, Any]:
    """The config with its last layers alone."""
    changed = settings | {"num_hidden_layers": layers}
    if "layer_types" in settings:
        changed["layer_types"] = settings["layer_types"][-layers:]
    return changed


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
    parser.add_argument("config", type=Path, help="a config.json")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, help="fewer layers than the real model")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    settings = json.loads(given.config.read_text("utf-8"))
    if given.layers is not None:
        settings = fewer_layers(settings, given.layers)
    print(f"{given.folder}: {write(settings, given.folder, device=given.device):,} bytes")


if __name__ == "__main__":
    main()
