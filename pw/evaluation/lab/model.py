"""A checkpoint that runs in fp32 with any width in any block. Knows no text and no score.

Blocks are decoded once per width and kept in the tables' own 16-bit type, which holds them exactly;
those in use stand ready in fp32, and only blocks whose width changes are exchanged.

Axes: S tokens of a window, V vocabulary; n = L * E * 2 blocks in geometry order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from pw.blocks import MODULES, BlockKey, Module
from pw.errors import ConfigError
from pw.evaluation.lab.experts import TogetherExperts
from pw.models.checkpoint import Checkpoint
from pw.models.dense import ExpertObserver, TorchExperts
from pw.models.dequantized import DequantizedBlocks
from pw.models.experts import Activation
from pw.models.skeleton import load_skeleton
from pw.store.artifact import Artifact

UNQUANTIZED = 0  # as a width: the checkpoint's own weight

Bits = NDArray[np.int64]  # [n] width of each block, or UNQUANTIZED


class Memo:
    """What the start of the network gave for one window. Filled by one pass, read by later ones
    whose blocks do not differ before MoE slot `slots`.
    """

    def __init__(self, slots: int = 0) -> None:
        self.slots = slots
        self.attention: dict[int, Tensor] = {}  # by layer, that of slot `slots` included
        self.experts: dict[int, Tensor] = {}  # by slot, below `slots`


class LabModel:
    """A model small enough to be held whole.

    Args:
        artifact: Where widths come from.
        checkpoint: What the artifact was made from.
        device: Where it runs. In fp32 everywhere, so that losses of a window differ by rounding.

    Attributes:
        geometry: Of the routed experts.
        widths: Widths of the artifact, ascending.
        experts: The routed experts; a subclass of `TorchExperts` may take their place.
    """

    def __init__(
        self, artifact: Artifact, checkpoint: Checkpoint, device: str | torch.device = "cpu"
    ) -> None:
        self.device = torch.device(device)
        self.artifact, self.checkpoint = artifact, checkpoint
        self.geometry = checkpoint.geometry
        self.widths = range(artifact.min_bits, artifact.max_bits + 1)
        # A GPU's fused kernels have no gradients, which `damage_scores` asks for.
        plain = self.device.type != "cpu"
        self._skeleton = load_skeleton(checkpoint, torch.float32, self.device, plain=plain)
        self._blocks = DequantizedBlocks(artifact, self.device)
        self._decoded: dict[tuple[int, int], Tensor] = {}  # (block, bits) -> [N, K], 16 bit
        self._originals = [checkpoint.expert_weight(key) for key in self.geometry.keys()]
        self._held = self.unquantized()
        self._stacks = self._stacked_originals()
        self.experts = self._make_experts()
        self._skeleton.bind_experts(self._call_experts)
        self._pass = _Pass(Memo(), False, 0, self.geometry.layers)
        self._context = _CausalAttention(self._pass)

    @classmethod
    def open(
        cls, artifact: str | Path, checkpoint: str | Path, device: str | torch.device = "cpu"
    ) -> LabModel:
        """The model of an artifact and the checkpoint that it was made from."""
        return cls(Artifact.open(artifact), Checkpoint.open(Path(checkpoint)), device)

    def unquantized(self) -> Bits:
        """The allocation in which every block is the checkpoint's own."""
        return self.uniform(UNQUANTIZED)

    def uniform(self, bits: int) -> Bits:
        """The allocation of one width for all blocks."""
        return np.full(self.geometry.blocks, bits, dtype=np.int64)

    def hold(self, bits: Bits) -> None:
        """Exchange the weights of the blocks whose width is not `bits` [n] yet."""
        if bits.shape != self._held.shape:
            raise ValueError(f"expected {self._held.shape} widths, got {bits.shape}")
        for index in np.flatnonzero(bits != self._held).tolist():
            self._slice(index).copy_(self.weight(index, int(bits[index])))
            self._held[index] = bits[index]

    def weight(self, index: int, bits: int) -> Tensor:
        """[N, K] fp32 of a block at a width."""
        if bits == UNQUANTIZED:
            return self._originals[index].to(self.device, torch.float32)
        kept = self._decoded.get((index, bits))
        if kept is None:
            whole = self._blocks.weight(self.geometry.key(index), bits)
            kept = self._decoded[index, bits] = whole.to(self.artifact.lut_dtype)
        return kept.float()

    def activation(self, slot: int) -> Activation:
        """Gated activation of a MoE layer's experts."""
        return self._skeleton.activations[slot]

    def logits(
        self, ids: Tensor, first: int = 0, memo: Memo | None = None, changed: int = 0
    ) -> Tensor:
        """Logits [S - 1 - first, V] at positions `first` .. S - 2 of one window [S].

        Args:
            ids: The window.
            first: First position that is wanted.
            memo: Of this window: filled if empty, else used.
            changed: First MoE slot whose blocks differ from when `memo` was filled; at most its
                `slots`.
        """
        ids = ids.to(self.device)
        keep = torch.arange(first, len(ids) - 1, device=self.device)
        self._pass = _Pass(memo or Memo(), memo is not None, changed, self.geometry.layers)
        self._context.current = self._pass
        positions = torch.arange(len(ids), device=self.device)
        return self._skeleton.forward(ids, positions, self._context, keep).float()

    @contextmanager
    def watched(self, observer: ExpertObserver) -> Iterator[None]:
        """Let an observer see the experts."""
        self.experts.observer = observer
        try:
            yield
        finally:
            self.experts.observer = None

    def _call_experts(
        self, slot: int, module: nn.Module, x: Tensor, ids: Tensor, weights: Tensor
    ) -> Tensor:
        now = self._pass
        if slot < now.changed and not now.filling:
            return now.memo.experts[slot]
        output = self.experts(slot, module, x, ids, weights)
        if now.filling and slot < now.memo.slots:
            now.memo.experts[slot] = output
        return output

    def _weight(self, slot: int, expert: int, module: Module, _: torch.device) -> Tensor:
        return self._stacks[slot, module][expert]

    def _stack(self, slot: int, module: Module) -> Tensor:
        return self._stacks[slot, module]

    def _slice(self, index: int) -> Tensor:
        """Where the weight [N, K] of a block stands."""
        key = self.geometry.key(index)
        return self._stacks[self.geometry.slot(key.layer), key.module][key.expert]

    def _stacked_originals(self) -> dict[tuple[int, Module], Tensor]:
        """Weights [E, N, K] in fp32 of every slot and module."""
        places = dict(zip(self.geometry.keys(), self._originals, strict=True))
        return {
            (slot, module): torch.stack(
                [
                    places[BlockKey(layer, expert, module)].to(self.device, torch.float32)
                    for expert in range(self.geometry.experts)
                ]
            )
            for slot, layer in enumerate(self.geometry.layers)
            for module in MODULES
        }

    def _make_experts(self) -> TorchExperts:
        activations = list(self._skeleton.activations)
        if self.device.type == "cpu":
            return TorchExperts(self._weight, self._bias, activations)
        return TogetherExperts(self._weight, self._bias, activations, self._stack)

    def _bias(self, slot: int, expert: int, module: Module) -> Tensor | None:
        bias = self._skeleton.biases[slot][MODULES.index(module)]
        return None if bias is None else bias[expert]


class _Pass:
    """One forward pass and what it may take from, or leave in, a memo."""

    def __init__(self, memo: Memo, keep: bool, changed: int, layers: tuple[int, ...]) -> None:
        self.memo, self.changed = memo, changed
        self.filling = keep and not memo.attention
        self.reads = layers[changed] if memo.attention else -1  # last layer taken from the memo
        self.fills = layers[memo.slots] if self.filling else -1  # ... left in it


class _CausalAttention:
    """Full causal attention of one window (see `pw.models.attention.AttentionContext`)."""

    def __init__(self, current: _Pass) -> None:
        self.current = current
        self._keys: dict[int, tuple[Tensor, Tensor]] = {}

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
        """See `AttentionContext`.

        Raises:
            ConfigError: The model does more than plain causal attention.
        """
        if softcap is not None or sinks is not None or (window or len(q)) < len(q):
            raise ConfigError("the lab knows no attention with windows, softcaps or sinks")
        now = self.current
        if layer <= now.reads:
            return now.memo.attention[layer]
        if write:
            self._keys[layer] = (k, v)
        k, v = self._keys[layer]
        grouped = q.shape[1] != k.shape[1]
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
        out = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=grouped
        )[0].transpose(0, 1)
        if layer <= now.fills:
            now.memo.attention[layer] = out
        return out
