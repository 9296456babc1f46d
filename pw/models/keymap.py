"""Which tensor on disk is which tensor of the model, and which are pieces of routed experts.

Uses transformers' own conversion tables, so that every layout that transformers loads is found:
one tensor per expert and projection, or one fused tensor per layer. A few spellings of re-uploads
that transformers does not know are understood as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from pw.blocks import Module
from pw.errors import ModelError
from pw.models.architecture import Architecture

_WRAPPERS = (  # a text model inside a multimodal one
    (re.compile(r"^model\.language_model\."), "model."),
    (re.compile(r"^language_model\.(model|lm_head)\."), r"\1."),
)
_SPELLINGS = (  # re-uploads of fused experts
    (re.compile(r"\.moe\.experts\."), ".experts."),
    (re.compile(r"(\.experts\.(?:gate_up|down)_proj)\.weight$"), r"\1"),
)
_SINGLE = re.compile(r"^(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w3|w2)(?:\.weight)?$")
_RANKS: dict[str, tuple[Module, int]] = {
    "gate_proj": ("gate_up", 0), "w1": ("gate_up", 0),
    "up_proj": ("gate_up", 1), "w3": ("gate_up", 1),
    "down_proj": ("down", 0), "w2": ("down", 0),
}  # fmt: skip


_SAVE_AGAIN = "save the checkpoint with transformers' `save_pretrained`, whose layout is read"


@dataclass
class KeyMap:
    """Names on disk by their role."""

    dense: dict[str, str] = field(default_factory=dict)  # name on disk -> name in the model
    fused: dict[tuple[int, Module], str] = field(default_factory=dict)  # [E, ...] of a layer
    biases: dict[tuple[int, Module], str] = field(default_factory=dict)  # [E, N] of a layer
    # (layer, expert, module) -> {rank: name}; rank 0 is gate or down, 1 is up
    single: dict[tuple[int, int, Module], dict[int, str]] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)  # no part of the text model


def map_keys(architecture: Architecture, names: Iterable[str]) -> KeyMap:
    """Assign every name on disk a role.

    Raises:
        ModelError: A tensor needs a conversion that this code does not do.
    """
    mapper = _Mapper(architecture)
    result = KeyMap()
    for name in names:
        mapper.assign(name, result)
    return result


class _Mapper:
    """The rename tables of one architecture."""

    def __init__(self, architecture: Architecture) -> None:
        model: Any = architecture.meta
        transforms = get_model_conversion_mapping(model)
        self._renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        self._converters = [t for t in transforms if isinstance(t, WeightConverter)]
        self._prefix = model.base_model_prefix
        self._meta = model.state_dict()
        self._rules = (*_WRAPPERS, *_SPELLINGS) if architecture.multimodal else _SPELLINGS
        self._experts = architecture.experts

    def assign(self, name: str, out: KeyMap) -> None:
        """File `name` under its role in `out`."""
        spelled = name
        for pattern, replacement in self._rules:
            spelled = pattern.sub(replacement, spelled)
        target, pattern_used = rename_source_key(
            spelled, self._renamings, self._converters, self._prefix, self._meta
        )
        parent, _, leaf = target.rpartition(".")
        if parent in self._experts:
            self._assign_expert(name, parent, leaf, pattern_used, out)
        elif match := self._single_expert(target):
            layer, expert, projection = match
            module, rank = _RANKS[projection]
            _put(out.single.setdefault((layer, expert, module), {}), rank, name)
        elif target not in self._meta:
            out.ignored.append(name)
        elif pattern_used is not None:
            raise ModelError(
                f"tensor needs a conversion that is not supported: `{name}`", _SAVE_AGAIN
            )
        else:
            out.dense[name] = target

    def _single_expert(self, target: str) -> tuple[int, int, str] | None:
        """(layer, expert, projection) of a tensor of one expert that transformers cannot name."""
        match = _SINGLE.match(target)
        if match is None or match[1] not in self._experts:
            return None
        return self._experts[match[1]], int(match[2]), match[3]

    def _assign_expert(
        self, name: str, parent: str, leaf: str, pattern: str | None, out: KeyMap
    ) -> None:
        """File a tensor that belongs to an experts module."""
        layer = self._experts[parent]
        module: Module = "gate_up" if leaf.startswith("gate_up_proj") else "down"
        if leaf in ("gate_up_proj_bias", "down_proj_bias") and pattern is None:
            _put(out.biases, (layer, module), name)
            out.dense[name] = f"{parent}.{leaf}"
        elif leaf in ("gate_up_proj", "down_proj") and pattern is None:
            _put(out.fused, (layer, module), name)
        elif leaf in ("gate_up_proj", "down_proj") and pattern is not None:
            rank = self._rank(pattern, name)
            expert = re.search(r"\.experts\.(\d+)\.", name)
            if expert is None:
                raise ModelError(f"no expert number in `{name}`", _SAVE_AGAIN)
            _put(out.single.setdefault((layer, int(expert[1]), module), {}), rank, name)
        elif f"{parent}.{leaf}" in self._meta:
            out.dense[name] = f"{parent}.{leaf}"
        else:
            raise ModelError(
                f"routed experts are stored in a form that is not read: `{name}`", _SAVE_AGAIN
            )

    def _rank(self, pattern: str, name: str) -> int:
        """Position of a per-expert tensor among the rows of its block."""
        for converter in self._converters:
            if pattern in converter.source_patterns:
                plain = all(
                    (isinstance(step, MergeModulelist) and step.dim == 0)
                    or (isinstance(step, Concatenate) and step.dim == 1)
                    for step in converter.operations
                )
                if not plain:
                    steps = [type(step).__name__ for step in converter.operations]
                    raise ModelError(
                        f"expert conversion {steps} is not supported: `{name}`", _SAVE_AGAIN
                    )
                return int(converter.source_patterns.index(pattern))
        raise ModelError(f"no conversion known for `{name}`", _SAVE_AGAIN)


def _put(table: dict[Any, str], key: Any, name: str) -> None:
    """Set `table[key]`, refusing two tensors in one role."""
    if key in table:
        raise ModelError(
            f"two tensors claim the same place: `{table[key]}` and `{name}`", _SAVE_AGAIN
        )
    table[key] = name
