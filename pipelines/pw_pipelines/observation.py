"""A dense model that reads windows of text under observation, with experts that can be exchanged.

What is measured is the observers' business (`pw.models.dense.ExpertObserver`).

Axes: P windows, B windows of a batch, S tokens of a window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from pw.blocks import BlockKey
from pw.models.checkpoint import Checkpoint
from pw.models.dense import ExpertObserver, TorchExperts, load_dense
from pw.models.experts import expert_modules

Weights = Callable[[BlockKey], Tensor]  # -> [N, K], any float dtype

_TOKENS_PER_BATCH = 2048


class ObservedModel:
    """A loaded model.

    Args:
        checkpoint: An opened checkpoint with experts.
        device: Where to run; "auto" = the GPU if there is one.
    """

    def __init__(self, checkpoint: Checkpoint, device: str = "auto") -> None:
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(device)
        self.geometry = checkpoint.geometry
        dtype = torch.float32 if self.device.type == "cpu" else checkpoint.weight_dtype
        self._model: Any = load_dense(checkpoint, dtype, self.device)
        experts: Any = expert_modules(self._model)[0][1]
        self._experts: TorchExperts = experts.pw_experts
        self._original = self._experts.weight

    def weight(self, key: BlockKey) -> Tensor:
        """Unquantized weight [N, K] of a block."""
        slot = self.geometry.slot(key.layer)
        weight: Tensor = self._original(slot, key.expert, key.module, self.device)
        return weight

    @torch.no_grad()
    def logits(
        self,
        windows: Tensor,
        observer: ExpertObserver | None = None,
        weights: Weights | None = None,
    ) -> Tensor:
        """Logits [B, S, vocab] of windows [B, S], with other expert weights if given."""
        return self._forward(windows, observer, weights)

    def losses(self, windows: Tensor, weights: Weights | None = None) -> Tensor:
        """Loss [B, S-1] in nats of every token but the first of windows [B, S]."""
        return _losses(self.logits(windows, weights=weights), windows.to(self.device))

    def backward(self, windows: Tensor, observer: ExpertObserver) -> None:
        """Read windows [B, S] and back-propagate the sum of all tokens' losses."""
        with torch.enable_grad():
            logits = self._forward(windows, observer, None)
            torch.autograd.backward(_losses(logits, windows.to(self.device)).sum())

    def _forward(
        self, windows: Tensor, observer: ExpertObserver | None, weights: Weights | None
    ) -> Tensor:
        layers = self.geometry.layers
        self._experts.observer = observer
        self._experts.weight = (
            self._original
            if weights is None
            else lambda slot, expert, module, _: weights(BlockKey(layers[slot], expert, module))
        )
        output = self._model(input_ids=windows.to(self.device), use_cache=False)
        logits: Tensor = output.logits
        return logits


def batches(windows: Tensor) -> Iterator[Tensor]:
    """Windows [P, S] in batches of some thousand tokens."""
    yield from torch.split(windows, max(1, _TOKENS_PER_BATCH // windows.shape[1]))


def _losses(logits: Tensor, windows: Tensor) -> Tensor:
    flat = cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), windows[:, 1:].flatten(), reduction="none"
    )
    return flat.view(windows.shape[0], -1)
