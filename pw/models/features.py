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

    A pass over a chunk adds layer after layer, from the first to the last, which takes the pass in.
    Of one that breaks in between nothing is left once the next begins. Nothing here waits for the
    device. A pass over a short prompt takes as long as the host needs to launch it: so a layer has
    three launches of it, and what else is to be summed comes at the end.
    """

    def __init__(self, layers: int, hidden_size: int, device: torch.device | str = "cpu") -> None:
        self._tokens = 0
        self._hidden = torch.zeros(layers, hidden_size, dtype=torch.float64, device=device)
        self._norms = torch.zeros(layers, 2, dtype=torch.float64, device=device)  # and squares
        self._largest = torch.zeros(layers, dtype=torch.float32, device=device)
        self._pass_hidden = torch.empty_like(self._hidden)  # of the pass in hand
        self._pass_norms: list[Tensor] = []  # of its tokens [T], by layer

    def add(self, layer: int, hidden: Tensor) -> None:
        """Take in a chunk of hidden states [T, H], any float dtype.

        Raises:
            ValueError: Not the next layer, nor the first; or another T than at the first.
        """
        if not hidden.shape[0]:
            return
        if layer == 0:
            self._pass_norms = []
        before = self._pass_norms
        if layer != len(before) or any(len(norms) != len(hidden) for norms in before[:1]):
            raise ValueError(
                f"layer {layer} of {len(hidden)} tokens after {len(before)} layers of "
                f"{len(before[0]) if before else 0}"
            )
        self._pass_hidden[layer] = hidden.sum(0, dtype=torch.float64)
        before.append(torch.linalg.vector_norm(hidden, dim=1, dtype=torch.float32))
        if len(before) == len(self._hidden):
            self._take(torch.stack(before))

    def _take(self, norms: Tensor) -> None:
        """Add a pass: its token norms [L, T], and what it summed."""
        wide = norms.double()
        self._tokens += norms.shape[1]
        self._hidden += self._pass_hidden
        self._norms += torch.stack((wide.sum(1), wide.square().sum(1)), 1)
        torch.maximum(self._largest, norms.amax(1), out=self._largest)
        self._pass_norms = []

    def features(self) -> Tensor:
        """Features [L, 3 + H] float32 of all tokens so far.

        Raises:
            ValueError: No token was added, or the last ones not at all layers.
        """
        if not self._tokens or self._pass_norms:
            layers = f"{len(self._pass_norms)} of {len(self._hidden)} layers of a pass in hand"
            raise ValueError(f"no features of {self._tokens} tokens and {layers}")
        mean, square = (self._norms / self._tokens).unbind(1)
        logs = torch.stack((mean, square.sqrt(), self._largest.double()), 1).clamp_min(_FLOOR).log()
        return torch.cat((logs, self._hidden / self._tokens), 1).float()


def prompt_features(hidden: Tensor) -> Tensor:
    """Features [3 + H] float32 of a whole prompt's hidden states [T, H] at one layer."""
    sums = FeatureSums(1, hidden.shape[1], hidden.device)
    sums.add(0, hidden)
    return sums.features()[0]
