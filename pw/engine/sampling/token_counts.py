"""How often a sequence has had each of its tokens: what penalties go by."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np


class TokenCounts:
    """Tokens that a sequence has had, each once, and how often its output has had them."""

    def __init__(self, prompt: Seq[int]) -> None:
        self.tokens = np.unique(np.asarray(prompt, dtype=np.int64))
        self.counts = np.zeros(len(self.tokens), dtype=np.float32)
        self._place = {int(token): place for place, token in enumerate(self.tokens)}
        self._seen = 0  # tokens of the output counted

    def follow(self, output: Seq[int]) -> None:
        """Count what the output has gained since the last call."""
        new = [token for token in output[self._seen :] if token not in self._place]
        for token in new:
            self._place.setdefault(token, len(self._place))
        if new:
            grown = np.zeros(len(self._place), dtype=np.float32)
            grown[: len(self.counts)] = self.counts
            self.counts, self.tokens = grown, np.fromiter(self._place, np.int64, len(self._place))
        for token in output[self._seen :]:
            self.counts[self._place[token]] += 1
        self._seen = len(output)
