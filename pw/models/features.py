"""Features of a prompt at one layer, the inputs of the residual heads.

The same function serves the offline trace (whole prompts) and the engine (prompts in chunks), so
that heads see at run time what they were fitted on.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALARS = 3  # log mean, log RMS and log max of the token norms
_FLOOR = 1e-12  # below any norm that occurs; keeps the logarithm finite


def feature_count(hidden_size: int) -> int:
    """Number of features F of a layer whose hidden states have `hidden_size` columns."""
    return SCALARS + hidden_size


class FeatureSums:
    """Sums over the tokens of a prompt at L layers, from which its features follow.

    Nothing here waits for the device. A pass over a short prompt takes as long as the host needs to
    launch it: so a layer has three launches of it, and what else is to be summed comes at the end.
    """

    def __init__(self, layers: int, hidden_size: int, device: torch.device | str = "cpu") -> None:
        self._tokens = [0] * layers
        self._hidden = torch.zeros(layers, hidden_size, dtype=torch.float64, device=device)
        self._norms = torch.zeros(layers, 2, dtype=torch.float64, device=device)  # and squares
        self._largest = torch.zeros(layers, dtype=torch.float32, device=device)
        self._pass: list[Tensor | None] = [None] * layers  # token norms [T] of the pass in hand

    def add(self, layer: int, hidden: Tensor) -> None:
        """Take in a chunk of hidden states [T, H], any float dtype; the same T at all layers."""
        if not hidden.shape[0]:
            return
        self._tokens[layer] += hidden.shape[0]
        self._hidden[layer] += hidden.sum(0, dtype=torch.float64)
        self._pass[layer] = torch.linalg.vector_norm(hidden, dim=1, dtype=torch.float32)
        norms = [its for its in self._pass if its is not None]
        if len(norms) == len(self._pass):
            self._take(torch.stack(norms))

    def _take(self, norms: Tensor) -> None:
        """Add the token norms [L, T] of a pass."""
        wide = norms.double()
        self._norms += torch.stack((wide.sum(1), wide.square().sum(1)), 1)
        torch.maximum(self._largest, norms.amax(1), out=self._largest)
        self._pass = [None] * len(self._pass)

    def features(self) -> Tensor:
        """Features [L, 3 + H] float32 of all tokens so far.

        Raises:
            ValueError: No token was added, or not at all layers.
        """
        tokens = self._tokens[0]
        if not tokens or any(count != tokens for count in self._tokens):
            raise ValueError(f"no features of a prompt with these tokens by layer: {self._tokens}")
        mean, square = (self._norms / tokens).unbind(1)
        logs = torch.stack((mean, square.sqrt(), self._largest.double()), 1).clamp_min(_FLOOR).log()
        return torch.cat((logs, self._hidden / tokens), 1).float()


def prompt_features(hidden: Tensor) -> Tensor:
    """Features [3 + H] float32 of a whole prompt's hidden states [T, H] at one layer."""
    sums = FeatureSums(1, hidden.shape[1], hidden.device)
    sums.add(0, hidden)
    return sums.features()[0]
