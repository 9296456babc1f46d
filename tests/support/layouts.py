"""The same fused experts as others store them: names and cuts that re-uploads use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]


def rewrite(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    """Change the tensors of a one-file checkpoint."""
    file = folder / "model.safetensors"
    save_file({k: v.contiguous() for k, v in change(load_file(file)).items()}, file)


def with_suffix(tensors: Tensors) -> Tensors:
    """`experts.gate_up_proj` -> `experts.gate_up_proj.weight`."""
    return {
        f"{k}.weight" if k.endswith((".gate_up_proj", ".down_proj")) else k: v
        for k, v in tensors.items()
    }


def with_infix(tensors: Tensors) -> Tensors:
    """`.experts.` -> `.moe.experts.`."""
    return {k.replace(".experts.", ".moe.experts."): v for k, v in tensors.items()}


def per_expert(tensors: Tensors, layers: tuple[str, ...] = ("0", "1", "2", "3")) -> Tensors:
    """Fused experts of some layers split into one tensor per expert and projection."""
    out: Tensors = {}
    for key, value in tensors.items():
        stem, _, leaf = key.rpartition(".")
        if leaf not in ("gate_up_proj", "down_proj") or key.split(".")[3] not in layers:
            out[key] = value
            continue
        for expert, weight in enumerate(value):
            if leaf == "down_proj":
                out[f"{stem}.{expert}.down_proj.weight"] = weight
            else:
                gate, up = weight.chunk(2)
                out[f"{stem}.{expert}.gate_proj.weight"] = gate
                out[f"{stem}.{expert}.up_proj.weight"] = up
    return out


def mixed(tensors: Tensors) -> Tensors:
    """Two layers cut by expert, the others fused with a suffix."""
    return with_suffix(per_expert(tensors, ("1", "3")))
