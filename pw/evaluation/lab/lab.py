"""Negative log-likelihood and divergence from the unquantized model, window by window.

Each window is a context of its own. Its tokens from `scored` on are predicted (the first never is),
as in `pw.evaluation.perplexity`, so that both give the same perplexity.

Axes: P windows, S tokens of a window, H hidden, V vocabulary, n blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pw.evaluation.lab.model import Bits, LabModel, Memo

Floats = NDArray[np.float64]
_ROWS = 512  # positions whose log-probabilities are in memory at a time


@dataclass(frozen=True)
class Scores:
    """Means over the scored tokens of each window, in nats per token."""

    nll: Floats  # [P] negative log-probability of the text
    kl: Floats  # [P] divergence of the next-token distribution from the unquantized model's

    @property
    def perplexity(self) -> float:
        """Of all windows, each with the same weight."""
        return float(np.exp(self.nll.mean()))

    def excess(self, dense: Scores) -> Floats:
        """Rise [P] of the loss over the unquantized model's."""
        return np.asarray(self.nll - dense.nll)


@dataclass(frozen=True)
class Window:
    """One context."""

    ids: Tensor  # [S] int64
    scored: int = 1  # first token that counts


class Lab:
    """Scores allocations on a fixed set of windows.

    Args:
        model: Runs them.
        windows: Token ids; a plain tensor is scored from its second token on.
        like: A lab of the same checkpoint and windows, whose unquantized results are taken.
    """

    def __init__(
        self,
        model: LabModel,
        windows: Iterable[Tensor | Window],
        like: Lab | None = None,
    ) -> None:
        self.model, self._like = model, like
        self.windows = [w if isinstance(w, Window) else Window(w) for w in windows]
        self._references: list[Tensor] = []  # [S - scored, V] fp16 of each window
        self._starts = [Memo() for _ in self.windows]  # of the part that no block can change
        self._dense: list[float] = []

    @property
    def dense(self) -> Scores:
        """The unquantized model."""
        self.prepare()
        return Scores(np.array(self._dense), np.zeros(len(self._dense)))

    def score(self, bits: Bits | Sequence[Bits]) -> Scores:
        """Score one allocation [n], or one for each window [P, n].

        Weights change between windows only, as an engine changes them between steps.
        """
        table = np.asarray(bits, dtype=np.int64)
        if table.ndim == 1:
            table = np.broadcast_to(table, (len(self.windows), len(table)))
        if len(table) != len(self.windows):
            raise ValueError(f"{len(table)} allocations for {len(self.windows)} windows")
        self.prepare()
        pairs = []
        for place, window in enumerate(self.windows):
            self.model.hold(table[place])
            pairs.append(self.compare(place, self._run(place, window)))
        nll, kl = np.array(pairs, dtype=np.float64).T
        return Scores(nll, kl)

    @torch.no_grad()
    def compare(self, place: int, logits: Tensor) -> tuple[float, float]:
        """Mean loss and divergence of one window from its logits [S - scored, V]."""
        window, reference = self.windows[place], self._references[place]
        targets = window.ids[window.scored :].to(logits.device)
        sums = torch.zeros(2, dtype=torch.float64, device=logits.device)
        parts = (torch.split(tensor, _ROWS) for tensor in (logits, reference, targets))
        for some, wanted, ids in zip(*parts, strict=True):
            got, expected = some.log_softmax(-1), wanted.float()
            sums[0] -= got.gather(1, ids[:, None]).double().sum()
            sums[1] += torch.linalg.vecdot(expected.exp(), expected - got).double().sum()
        nll, kl = (sums / len(targets)).tolist()
        return nll, kl

    @torch.no_grad()
    def _run(self, place: int, window: Window) -> Tensor:
        return self.model.logits(window.ids, window.scored - 1, self._starts[place])

    @torch.no_grad()
    def prepare(self) -> None:
        """Run the unquantized model now, if it has not run; with the experts that it has now."""
        if self._references:
            return
        if self._like is not None:
            self._like.prepare()
            self._references, self._dense = self._like._references, self._like._dense
            return
        self.model.hold(self.model.unquantized())
        for place, window in enumerate(self.windows):
            own = self._run(place, window).log_softmax(-1)
            targets = window.ids[window.scored :].to(own.device)
            self._dense.append(-float(own.gather(1, targets[:, None]).double().mean()))
            self._references.append(own.half())
