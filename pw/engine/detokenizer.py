"""Incremental text of one sequence: whole characters only, never part of a stop string.

`tokenizers.DecodeStream` turns ids into text; what it holds back (half a character) and what may
still become a stop string is kept here and flushed at the end.
"""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class Detokenizer:
    """Text of one sequence as it grows.

    Args:
        tokenizer: The fast tokenizer's Rust side (`PreTrainedTokenizerFast.backend_tokenizer`).
        stop: Strings that end the sequence.
        include_stop: Leave the stop string in the text.
        skip_special_tokens: Special tokens have no text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._include_stop = include_stop
        self._skip = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._ids: list[int] = []
        self._decoded = ""  # all text the stream gave
        self._sent = 0  # characters of it already returned
        self.stopped = False

    def append(self, token: int) -> str:
        """Add a token; text that is certain now. Sets `stopped` at a stop string."""
        self._ids.append(token)
        self._decoded += self._stream.step(self._tokenizer, token) or ""
        return self._advance(final=False)

    def finish(self) -> str:
        """Text held back until now, at the end of the sequence."""
        if not self.stopped:
            whole = self._tokenizer.decode(self._ids, skip_special_tokens=self._skip)
            if len(whole) > len(self._decoded) and whole.startswith(self._decoded):
                self._decoded = whole
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        if self.stopped:
            return ""
        cut = self._find_stop()
        if cut is not None:
            self.stopped = True
            end = max(cut, self._sent)
        else:
            end = len(self._decoded) - (0 if final else self._held_back())
        text = self._decoded[self._sent : end]
        self._sent = max(self._sent, end)
        return text

    def _find_stop(self) -> int | None:
        """Where the text must end, or None: the earliest stop string not yet passed."""
        best: tuple[int, int] | None = None
        for stop in self._stop:
            at = self._decoded.find(stop, self._sent)
            if at >= 0 and (best is None or (at, -len(stop)) < best):
                best = (at, -len(stop))
        if best is None:
            return None
        return best[0] - best[1] if self._include_stop else best[0]

    def _held_back(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self._decoded)), longest, -1):
                if self._decoded.endswith(stop[:size]):
                    longest = size
                    break
        return longest
