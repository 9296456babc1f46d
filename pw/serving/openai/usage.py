"""What a request used: tokens, cached tokens, and the bits that its answer saw."""

from __future__ import annotations

from typing import Any

from pw.engine.request import RequestOutput


class Usage:
    """Counts over all sequences of one request.

    Args:
        prompt_tokens: Of all prompts, each once.
        sequences: Their number.
        choices: Sequences of each prompt; they follow each other.
    """

    def __init__(self, prompt_tokens: int, sequences: int, choices: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._choices = choices
        self._completion_tokens = [0] * sequences
        self._cached_tokens = [0] * sequences
        self._min_bits: int | None = None
        self._weighted_bits = self._weight = 0.0

    def add(self, index: int, output: RequestOutput) -> None:
        """Note a sequence's next output."""
        self._completion_tokens[index] = output.completion_tokens
        self._cached_tokens[index] = max(self._cached_tokens[index], output.cached_tokens)
        if output.min_bits:
            known = self._min_bits
            self._min_bits = output.min_bits if known is None else min(known, output.min_bits)
        weight = len(output.token_ids)
        self._weighted_bits += weight * output.mean_bits
        self._weight += weight

    def json(self) -> dict[str, Any]:
        """OpenAI's `usage`: prompts counted once, completions summed; and our own part, `pw`.

        `mean_bits` is the mean over generated tokens, `min_bits` the least width of any block at
        any step; null before the first token.
        """
        completion = sum(self._completion_tokens)
        cached = sum(self._cached_tokens[:: self._choices])
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self._prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            "pw": {
                "mean_bits": self._weighted_bits / self._weight if self._weight else None,
                "min_bits": self._min_bits,
            },
        }
