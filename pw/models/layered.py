"""A model of which one decoder layer is in memory at a time, with its routed experts in the open.

transformers' own forward pass does all the work: every decoder layer but the one wanted hands its
input on unchanged, so whatever a model computes around its layers (masks, rotary tables, per-layer
embeddings, softcaps) is right without being known here. Embedding and norms stay loaded, and so
does the head once it has been asked for.

Axes: B windows of a batch, S tokens of a window, H hidden, V vocabulary.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pw.blocks import MODULES, BlockKey, Module
from pw.errors import ModelError
from pw.models.checkpoint import Checkpoint
from pw.models.dense import TorchExperts
from pw.models.experts import NAME as EXPERTS
from pw.models.experts import activation_of, bind_experts, expert_modules, gate_first, layer_of
from pw.models.skeleton import build, load_tensors

SharedKv = dict[str, tuple[Tensor, ...]]  # kind of attention -> keys and values of one batch


class LayeredModel:
    """The text model of a checkpoint, layers loaded when run. Parameters have no gradients.

    Args:
        checkpoint: A checkpoint with experts.
        dtype: Of the dense weights; experts keep the checkpoint's and are used in fp32.
        device: Where it runs.
        cache_bytes: Layers are kept once loaded while they fit into this; the one in use always is.

    Raises:
        ModelError: The checkpoint holds no experts.
    """

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, cache_bytes: int
    ) -> None:
        if not checkpoint.has_experts:
            raise ModelError(
                f"no routed experts in `{checkpoint.path}`",
                "name the original checkpoint: an artifact holds its experts as bit-planes",
            )
        definition: Any = checkpoint.architecture.meta
        attention = "sdpa" if definition._supports_sdpa else "eager"
        self._model: Any = build(
            checkpoint.architecture, dtype, attention=attention, experts=EXPERTS
        )
        self._base: Any = getattr(self._model, self._model.base_model_prefix)
        self._layers: Any = self._base.layers
        self._checkpoint, self._dtype, self._device = checkpoint, dtype, device
        self._names = self._names_by_layer()
        self._cache_bytes = cache_bytes
        self._held: dict[int, int] = {}  # layer in memory -> its bytes, in order of loading
        self._tables: dict[int, dict[Module, Tensor]] = {}  # slot -> weights [E, N, K]
        self._biases: dict[int, dict[Module, Tensor]] = {}  # slot -> biases [E, N], if any
        self._running: int | None = None  # the layer that computes; the others hand on
        self._given: Tensor | None = None  # what that layer gets, or what the last one gives
        self._shared: SharedKv = {}
        self._seen: Tensor | None = None  # what the first layer got, or what that layer gave
        self._head = self._names_of_head()  # loaded when logits are asked for: a gigabyte in some
        outer = [name for name in self._names[None] if name not in self._head]
        load_tensors(self._model, checkpoint, outer, dtype, device)
        self._model.tie_weights()
        activations = [activation_of(module) for _, module in expert_modules(self._model)]
        self.experts = TorchExperts(self._weight, self._bias, activations)
        bind_experts(self._model, self.experts)
        for index, layer in enumerate(self._layers):
            layer.forward = partial(self._call_layer, index, layer.forward)

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return len(self._layers)

    @property
    def shares_kv(self) -> bool:
        """Whether some layers read keys and values of others."""
        return any(kv.source != kv.layer for kv in self._checkpoint.kv.layers)

    @property
    def hidden_size(self) -> int:
        """H."""
        return int(self._checkpoint.architecture.config.hidden_size)

    @property
    def vocabulary(self) -> int:
        """Number of tokens that logits tell apart."""
        return int(self._checkpoint.architecture.config.vocab_size)

    def embed(self, ids: Tensor) -> Tensor:
        """Input [B, S, H] of the first layer for tokens [B, S]."""
        with torch.no_grad():
            return self._run(ids, None, None, {})

    def layer(self, index: int, ids: Tensor, hidden: Tensor, shared: SharedKv) -> Tensor:
        """Output [B, S, H] of a layer from its input; tracked by autograd where enabled.

        Args:
            index: Which layer.
            ids: Tokens [B, S].
            hidden: Input [B, S, H].
            shared: What layers of this batch share; the layer reads it or adds to it.
        """
        self._load(index)
        return self._run(ids, index, hidden, shared)

    def head(self, ids: Tensor, hidden: Tensor, keep: Tensor) -> Tensor:
        """Logits [B, n, V] at positions `keep` [n] from the last layer's output [B, S, H]."""
        if self._head:
            load_tensors(self._model, self._checkpoint, self._head, self._dtype, self._device)
            self._head = []
        self._running, self._given = None, hidden
        try:
            output = self._model(input_ids=ids, use_cache=False, logits_to_keep=keep)
        finally:
            self._given = None
        logits: Tensor = output.logits
        return logits

    def _run(
        self, ids: Tensor, index: int | None, hidden: Tensor | None, shared: SharedKv
    ) -> Tensor:
        self._running, self._given, self._shared = index, hidden, shared
        try:
            self._base(input_ids=ids, use_cache=False)
            assert self._seen is not None
            return self._seen
        finally:
            self._running = self._given = self._seen = None

    def _call_layer(
        self, index: int, forward: Any, hidden_states: Tensor, *args: Any, **options: Any
    ) -> Tensor:
        """What transformers calls instead of a layer."""
        if index == self._running:
            if "shared_kv_states" in options:
                options["shared_kv_states"] = self._shared
            self._seen = forward(self._given, *args, **options)
        elif self._running is None and self._given is None and index == 0:
            self._seen = hidden_states
        elif self._running is None and self._given is not None and index == self.layers - 1:
            return self._given
        return hidden_states

    def _names_by_layer(self) -> dict[int | None, list[str]]:
        """Names on disk of the dense tensors of each layer; None = of no layer."""
        prefix = next(n for n, m in self._model.named_modules() if m is self._layers) + "."
        found: dict[int | None, list[str]] = {i: [] for i in (None, *range(self.layers))}
        for name, target in self._checkpoint.keymap.dense.items():
            found[layer_of(target) if target.startswith(prefix) else None].append(name)
        return found

    def _names_of_head(self) -> list[str]:
        """Names on disk of the output matrix; none where it is the embedding."""
        head = self._model.get_output_embeddings()
        path = next(name for name, module in self._model.named_modules() if module is head)
        targets = self._checkpoint.keymap.dense
        return [name for name in self._names[None] if targets[name].startswith(f"{path}.")]

    def _load(self, index: int) -> None:
        """Have a layer in memory; where room is short, in place of the one loaded last."""
        if index in self._held:
            return
        size = self._layer_bytes(index)
        while self._held and sum(self._held.values()) + size > self._cache_bytes:
            self._drop(self._held.popitem()[0])
        load_tensors(self._model, self._checkpoint, self._names[index], self._dtype, self._device)
        if index in self._checkpoint.geometry.layers:
            self._load_experts(index)
        self._held[index] = size

    def _layer_bytes(self, index: int) -> int:
        geometry = self._checkpoint.geometry
        shapes = (self._checkpoint.shards.entry(name).shape for name in self._names[index])
        size = sum(math.prod(shape) for shape in shapes) * self._dtype.itemsize
        if index in geometry.layers:
            experts = geometry.weights // len(geometry.layers)
            size += experts * self._checkpoint.weight_dtype.itemsize
        return size

    def _load_experts(self, index: int) -> None:
        """Weights [E, N, K] of a layer's experts in their own dtype; biases where there are."""
        geometry, dtype = self._checkpoint.geometry, self._checkpoint.weight_dtype
        slot = geometry.slot(index)
        tables: dict[Module, Tensor] = {}
        for block in MODULES:
            shape = (geometry.experts, geometry.shape(block).rows, geometry.shape(block).cols)
            tables[block] = torch.empty(shape, dtype=dtype, device=self._device)
            for expert in range(geometry.experts):
                weight = self._checkpoint.expert_weight(BlockKey(index, expert, block))
                tables[block][expert] = weight
        self._tables[slot] = tables
        module: Any = expert_modules(self._model)[slot][1]
        if module.has_bias:
            gate_up = gate_first(module.gate_up_proj_bias, module, axis=1)
            self._biases[slot] = {"gate_up": gate_up, "down": module.down_proj_bias}

    def _drop(self, index: int) -> None:
        """Forget a layer's tensors."""
        for name in self._names[index]:
            parent, _, leaf = self._checkpoint.keymap.dense[name].rpartition(".")
            module = self._model.get_submodule(parent)
            old = module._parameters.get(leaf)
            if old is None:
                module._buffers[leaf] = module._buffers[leaf].to("meta")
            else:
                module._parameters[leaf] = nn.Parameter(old.to("meta"), requires_grad=False)
        if index in self._checkpoint.geometry.layers:
            slot = self._checkpoint.geometry.slot(index)
            del self._tables[slot]
            self._biases.pop(slot, None)

    def _weight(self, slot: int, expert: int, block: Module, _: torch.device) -> Tensor:
        return self._tables[slot][block][expert]

    def _bias(self, slot: int, expert: int, block: Module) -> Tensor | None:
        biases = self._biases.get(slot)
        return None if biases is None else biases[block][expert]
