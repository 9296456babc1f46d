"""What changes logits before a token is drawn: penalties, biases, tokens that may not come.

All sequences of a step at once: the places that change are gathered, changed and put back. Rows
have nothing in common, so a sequence's result does not depend on its neighbours. Arithmetic is
float32 in the order of `SamplingParams`.

Axes: S sequences, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pw.engine.sampling.token_counts import TokenCounts
from pw.engine.sequence import Sequence
from pw.memory.small_copies import to_device


@dataclass
class _Places:
    """Places of logits [S, V], collected row by row, with numbers for each of them."""

    rows: list[NDArray[np.int64]] = field(default_factory=list)
    tokens: list[NDArray[np.int64]] = field(default_factory=list)
    numbers: list[NDArray[np.float32]] = field(default_factory=list)  # [k, n] each

    def add(self, row: int, tokens: NDArray[np.int64], *numbers: Any) -> None:
        self.rows.append(np.full(len(tokens), row, dtype=np.int64))
        self.tokens.append(tokens)
        self.numbers.append(
            np.stack([np.broadcast_to(np.float32(number), tokens.shape) for number in numbers])
        )

    def on(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Flat places [n] int64 in `logits`, ids without a logit left out; numbers [k, n]."""
        vocabulary = logits.shape[1]
        tokens = np.concatenate(self.tokens)
        known = tokens < vocabulary
        flat = (np.concatenate(self.rows) * vocabulary + tokens)[known]
        numbers = np.concatenate(self.numbers, axis=1)[:, known]
        return to_device(flat, logits.device), to_device(numbers, logits.device)


def penalize(logits: Tensor, sequences: Seq[Sequence]) -> None:
    """Repetition, frequency and presence penalties, in place on logits [S, V] float32."""
    places = _Places()
    for row, sequence in enumerate(sequences):
        params = sequence.params
        if not params.penalized:
            continue
        if sequence.counts is None:
            sequence.counts = TokenCounts(sequence.prompt)
        counts = sequence.counts
        counts.follow(sequence.output)
        places.add(
            row,
            counts.tokens,
            counts.counts,
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        )
    if not places.rows:
        return
    flat, numbers = places.on(logits)
    count, repetition, frequency, presence = numbers.unbind()
    values = logits.view(-1)[flat]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * count
    values -= presence * (count > 0)
    logits.view(-1)[flat] = values


def bias(logits: Tensor, sequences: Seq[Sequence]) -> None:
    """Add `logit_bias`, in place on logits [S, V] float32."""
    places = _Places()
    for row, sequence in enumerate(sequences):
        if sequence.params.logit_bias:
            tokens, values = zip(*sequence.params.logit_bias, strict=True)
            places.add(row, np.array(tokens, dtype=np.int64), np.array(values, dtype=np.float32))
    if places.rows:
        flat, numbers = places.on(logits)
        logits.view(-1).index_add_(0, flat, numbers[0])


def block(logits: Tensor, blocked: Seq[Seq[int]]) -> None:
    """Make tokens impossible, in place on logits [S, V]: those of `blocked[row]`."""
    places = _Places()
    for row, tokens in enumerate(blocked):
        if tokens:
            places.add(row, np.array(tokens, dtype=np.int64), 0)
    if places.rows:
        logits.view(-1).index_fill_(0, places.on(logits)[0], -torch.inf)
