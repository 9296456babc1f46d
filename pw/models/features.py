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
    """Sums over the tokens of a prompt, from which its features follow.

    Nothing here waits for the device before `features`.
    """

    def __init__(self, hidden_size: int, device: torch.device | str = "cpu") -> None:
        self.tokens = 0
        self._norms = torch.zeros((), dtype=torch.float64, device=device)
        self._squares = torch.zeros((), dtype=torch.float64, device=device)
        self._largest = torch.zeros((), dtype=torch.float32, device=device)
        self._hidden = torch.zeros(hidden_size, dtype=torch.float64, device=device)

    def add(self, hidden: Tensor) -> None:
        """Take in a chunk of hidden states [T, H], any float dtype."""
        if not hidden.shape[0]:
            return
        values = hidden.float()
        norms = torch.linalg.vector_norm(values, dim=1)
        self.tokens += hidden.shape[0]
        self._norms += norms.sum(dtype=torch.float64)
        self._squares += norms.double().square().sum()
        torch.maximum(self._largest, norms.max(), out=self._largest)
        self._hidden += values.sum(0, dtype=torch.float64)

    def features(self) -> Tensor:
        """Features [3 + H] float32 of all tokens so far.

        Raises:
            ValueError: No token was added.
        """
        if not self.tokens:
            raise ValueError("a prompt without tokens has no features")
        scalars = torch.stack(
            (
                self._norms / self.tokens,
                (self._squares / self.tokens).sqrt(),
                self._largest.double(),
            )
        )
        logs = scalars.clamp_min(_FLOOR).log()
        return torch.cat((logs, self._hidden / self.tokens)).float()


def prompt_features(hidden: Tensor) -> Tensor:
    """Features [3 + H] float32 of a whole prompt's hidden states [T, H] at one layer."""
    sums = FeatureSums(hidden.shape[1], hidden.device)
    sums.add(hidden)
    return sums.features()
