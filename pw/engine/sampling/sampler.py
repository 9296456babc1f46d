"""Next tokens of a step's sequences: logits through what changes them, then a draw."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from pw.engine.outputs import blocked_tokens
from pw.engine.request import TokenLogprob
from pw.engine.sampling.draw import sample
from pw.engine.sampling.grammar import constrain
from pw.engine.sampling.logprobs import score
from pw.engine.sampling.processors import bias, block, penalize
from pw.engine.sequence import Sequence
from pw.memory.small_copies import to_device
from pw_kernels.likeliest import likeliest


class Sampler:
    """Chooses tokens. What a sequence needs for it lies in the sequence.

    Args:
        vocabulary: Tokens that have a text; no other is chosen.
        eos_token_ids: Ids that end a text.
    """

    def __init__(self, vocabulary: int, eos_token_ids: frozenset[int]) -> None:
        self._vocabulary, self._eos = vocabulary, eos_token_ids

    @staticmethod
    def reads_tokens(sequence: Sequence) -> bool:
        """Whether a draw depends on which tokens, and not only how many, have come before."""
        return sequence.params.penalized or sequence.grammar is not None

    def choose(self, ready: Seq[Sequence], logits: Tensor, unread: int = 0) -> Tensor:
        """Next token of each sequence, without a wait: [S] int64, -1 where logits are not finite.

        Args:
            ready: [S] sequences at their ends.
            logits: [S, V] as the model gave them; left as they are.
            unread: Tokens of each that the device has drawn and the host has not read; if there
                are, `reads_tokens` holds for none of them.
        """
        greedy = likeliest(logits, self._vocabulary)  # and -1 where it has to be
        plain = logits[:, : self._vocabulary]
        changed = self._changed(ready, plain, unread)
        if changed is None and not any(seq.chance for seq in ready):
            return greedy
        tokens = sample(
            plain if changed is None else changed,
            [seq.params for seq in ready],
            [
                None if seq.chance is None else seq.chance.at(len(seq.output) + unread)
                for seq in ready
            ],
            greedy.clone() if changed is None else None,
        )
        return torch.where(greedy < 0, greedy, tokens)

    def score(
        self, ready: Seq[Sequence], logits: Tensor, tokens: Tensor
    ) -> Callable[[], dict[int, TokenLogprob]]:
        """Log-probabilities of chosen tokens [S] by row, where they are wanted.

        They are the model's own, before anything changed its logits. To be asked for once
        a `small_copies.mark` is reached.
        """
        rows = [row for row, seq in enumerate(ready) if seq.params.logprobs is not None]
        if not rows:
            return dict
        counts = [ready[row].params.logprobs or 0 for row in rows]
        if len(rows) < len(ready):
            index = to_device(np.array(rows), logits.device)
            logits, tokens = logits[index], tokens[index]
        scored = score(logits, tokens, counts, self._vocabulary)
        return lambda: dict(zip(rows, scored(), strict=True))

    def _changed(self, ready: Seq[Sequence], logits: Tensor, unread: int = 0) -> Tensor | None:
        """A copy of the logits after everything but temperature; None if nothing changes them."""
        blocked = [blocked_tokens(seq, self._eos, len(seq.output) + unread) for seq in ready]
        params = [sequence.params for sequence in ready]
        if not any(blocked) and not any(
            its.penalized or its.logit_bias or its.grammar for its in params
        ):
            return None
        changed = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        changed.copy_(logits)
        penalize(changed, ready)
        bias(changed, ready)
        rows = [row for row, sequence in enumerate(ready) if sequence.grammar is not None]
        if rows:
            self._constrain(changed, ready, blocked, rows)
        block(changed, blocked)
        return changed

    def _constrain(
        self, logits: Tensor, ready: Seq[Sequence], blocked: list[tuple[int, ...]], rows: list[int]
    ) -> None:
        """Leave to `rows` what their grammars allow; they take over what is blocked."""
        words = np.zeros((len(rows), -(-self._vocabulary // 32)), dtype=np.int32)
        for place, row in enumerate(rows):
            grammar = ready[row].grammar
            assert grammar is not None
            grammar.fill(words, place, blocked[row])
            blocked[row] = ()
        constrain(logits, rows, words)
