"""A model's definition without weights: config, module tree on `meta`, geometry, or a refusal.

Everything that makes a model unservable is found here, by name and with the reason, before any
tensor is read. No code from a checkpoint is ever run.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from pw.blocks import BlockShape, ExpertGeometry
from pw.errors import ModelError
from pw.models.experts import NAME as EXPERTS
from pw.models.experts import expert_modules, layer_of, refusal
from pw.models.geometry import PROBE, Probe, probe
from pw.models.header import UNQUANTIZED
from pw.models.pointers import refuse_pointer

_log = logging.getLogger(__name__)
_SERVED = (
    "served are mixture-of-experts models: Qwen2-MoE, Qwen3-MoE, Mixtral, OLMoE, Gemma 4, "
    "DeepSeek V2 and V3, GLM-4-MoE, gpt-oss, GraniteMoE (docs/offline.md)"
)
_BROKEN = "correct config.json, or fetch the checkpoint again"
_BATCH_ROPE = ("dynamic", "longrope")  # their frequencies depend on the longest sequence of a batch


@dataclass(frozen=True)
class Architecture:
    """Config and shapes of a supported model."""

    name: str  # transformers' model_type, e.g. "qwen2_moe"
    config: Any  # of the text model
    multimodal: bool  # the checkpoint holds a text model inside a larger one
    meta: nn.Module  # the text model with every tensor on meta
    probe: Probe
    geometry: ExpertGeometry
    experts: dict[str, int]  # path of each experts module -> model layer

    @classmethod
    def load(cls, path: Path) -> Architecture:
        """Read `config.json` below `path` and examine the model.

        Raises:
            ModelError: No readable config, or a model that cannot be served, with the reason.
        """
        config, multimodal = _read_config(path)
        name = str(config.model_type)
        try:
            with torch.device("meta"):
                meta = text_model(config, torch.float32, attention=PROBE, experts=EXPERTS)
            modules = expert_modules(meta)
            _check(modules, config)
            found = probe(meta)
            geometry = _geometry(modules, found.top_k)
        except ModelError as error:
            raise _unsupported(name, error.message) from error
        except Exception as error:
            raise _unsupported(name, f"its forward pass cannot be traced: {error}") from error
        experts = {module_name: layer_of(module_name) for module_name, _ in modules}
        return cls(name, config, multimodal, meta, found, geometry, experts)


def text_model(config: Any, dtype: torch.dtype, *, attention: str, experts: str) -> Any:
    """The module tree of a text config, in eval mode, on the current default device."""
    factory: Any = AutoModelForCausalLM
    return factory.from_config(
        config,
        dtype=dtype,
        attn_implementation=attention,
        experts_implementation=experts,
        trust_remote_code=False,
    ).eval()


def _unsupported(name: str, reason: str, hint: str = _SERVED) -> ModelError:
    return ModelError(f"model is not supported: `{name}`: {reason}", hint)


def _read_config(path: Path) -> tuple[Any, bool]:
    """The text config below `path`, and whether it sits inside a multimodal one."""
    file = path / "config.json"
    if not file.is_file():
        raise ModelError(f"no config.json in `{path}`", "name a Hugging Face checkpoint folder")
    refuse_pointer(file)
    try:
        raw = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelError(f"not a readable model config: `{file}` ({error})", _BROKEN) from error
    if not isinstance(raw, dict) or "model_type" not in raw:
        raise ModelError(f"not a readable model config: `{file}` (it has no model_type)", _BROKEN)
    name = str(raw["model_type"])
    if quantization := raw.get("quantization_config"):
        stated = quantization if isinstance(quantization, dict) else {}
        method = stated.get("quant_method", "unknown method")
        raise _unsupported(name, f"its weights are already quantized ({method})", UNQUANTIZED)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        reason = " ".join(str(error).split()).partition(". ")[0]  # the rest is about installing
        raise _unsupported(
            name, f"transformers cannot read its config: {reason}",
            _BROKEN if name in CONFIG_MAPPING else _SERVED,
        ) from error  # fmt: skip
    text = getattr(config, "text_config", None)
    _note_norm_flag(raw, config if text is None else text)
    return (config, False) if text is None else (text, True)


def _note_norm_flag(raw: dict[str, Any], config: Any) -> None:
    """Say which default decides whether router weights are renormalized, if none is stated."""
    flag = "norm_topk_prob"
    stated = raw.get("text_config") or raw
    if hasattr(config, flag) and flag not in stated:
        _log.warning(
            "`%s` is not in config.json: using the default of `%s`: %s",
            flag,
            config.model_type,
            getattr(config, flag),
        )


def _check(modules: list[tuple[str, nn.Module]], config: Any) -> None:
    """Refuse what this code cannot serve."""
    if not modules:
        raise ModelError("no routed experts behind transformers' experts interface")
    for name, module in modules:
        if not getattr(module, "num_experts", 1):
            raise ModelError(f"it has zero routed experts (`{name}`)")
        if reason := refusal(module):
            raise ModelError(f"{reason} (`{name}`)")
    layers = [layer_of(name) for name, _ in modules]
    if len(set(layers)) != len(layers):
        raise ModelError("a layer has several groups of routed experts")
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *(value for value in ropes.values() if isinstance(value, dict))):
        if rope.get("rope_type") in _BATCH_ROPE:
            raise ModelError(f"rope type `{rope['rope_type']}` depends on the batch's longest text")


def _geometry(modules: list[tuple[str, Any]], top_k: int) -> ExpertGeometry:
    """Shapes of the routed experts, the same in every layer."""
    shapes = set()
    for _, module in modules:
        gate_up, down = tuple(module.gate_up_proj.shape), tuple(module.down_proj.shape)
        if module.is_transposed:
            gate_up, down = (gate_up[0], *gate_up[:0:-1]), (down[0], *down[:0:-1])
        shapes.add((gate_up, down))
    if len(shapes) != 1:
        raise ModelError(f"its layers differ in experts: {sorted(shapes)}")
    (experts, rows, cols), (_, down_rows, down_cols) = shapes.pop()
    layers = tuple(layer_of(name) for name, _ in modules)
    return ExpertGeometry(
        layers, experts, top_k, BlockShape(rows, cols), BlockShape(down_rows, down_cols)
    )
