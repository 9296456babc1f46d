"""Incremental text of one sequence: whole characters only, never part of a stop string.

`Decoder` turns tokens into text that no later token changes; `Detokenizer` keeps what may still
become a stop string and ends the text at the first one.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping

from tokenizers import Tokenizer

_UNFINISHED = "\ufffd"  # how a tokenizer writes half a character
_LONGEST_WINDOW = 64  # tokens decoded again at most, where nothing but noise comes


def byte_tokens(tokenizer: Tokenizer) -> dict[int, int]:
    """Byte of each byte-fallback token (`<0xE2>`) by id; empty for tokenizers without them."""
    ids = {byte: tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}
    if ids[0x41] is None or tokenizer.decode([ids[0x41]]) != "A":
        return {}
    return {token: byte for byte, token in ids.items() if token is not None}


class Decoder:
    """Text of a growing list of tokens, each piece given once and for good.

    Only a window of the latest tokens is decoded again. It opens with one piece that has been given
    out, as tokenizers strip or add a space at the start of a text:

        | given out already | new |        text of the window, less the text of the first part

    Bytes that are no UTF-8 become U+FFFD as soon as no further byte can save them. Byte-fallback
    tokenizers spoil a whole run of bytes at once if one of them is wrong, so runs are decoded here.

    Args:
        tokenizer: The fast tokenizer's Rust side.
        bytes_of: `byte_tokens(tokenizer)`.
        skip_special_tokens: Special tokens have no text.
    """

    def __init__(
        self, tokenizer: Tokenizer, bytes_of: Mapping[int, int], skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer, self._bytes_of, self._skip = tokenizer, bytes_of, skip_special_tokens
        self._run = codecs.getincrementaldecoder("utf-8")("replace")
        self._window: list[int] = []
        self._given = 0  # characters of the window's text that are given out
        self._settled = 0  # tokens of the window before the latest piece

    def step(self, token: int) -> str:
        """Add a token; the text that is certain now."""
        byte = self._bytes_of.get(token)
        if byte is not None:
            self._window.append(token)
            return self._run.decode(bytes((byte,)))
        if self._bytes_of:
            return self._step_beside_bytes(token)
        self._window.append(token)
        text = self._text(self._window)
        unfinished = text.endswith(_UNFINISHED) and len(self._window) < _LONGEST_WINDOW
        piece = text[self._given : len(text) - unfinished]
        self._given += len(piece)
        if not unfinished and (piece or len(self._window) >= _LONGEST_WINDOW):
            # The next window opens with the tokens of this piece.
            del self._window[: self._settled]
            self._settled = len(self._window)
            self._given = len(self._text(self._window))
        return piece

    def finish(self) -> str:
        """Half a character that nothing came to complete."""
        if self._bytes_of:
            return self._run.decode(b"", final=True)
        piece = self._text(self._window)[self._given :]
        self._given += len(piece)
        return piece

    def _step_beside_bytes(self, token: int) -> str:
        """A token that is no byte, in a tokenizer that has byte tokens: whole characters."""
        before = self._text(self._window)
        self._window.append(token)
        piece = self._text(self._window)[len(before) :]
        if not piece and len(self._window) < _LONGEST_WINDOW:
            return ""  # a special token: bytes on both sides of it are one run
        self._window = [token]
        return self._run.decode(b"", final=True) + piece

    def _text(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=self._skip)
        return text


class Detokenizer:
    """Text of one sequence as it grows, up to the stop string that is complete first.

    Which stop string ends the text does not depend on how tokens cut it: the one whose last
    character comes first, and of two that end there the longer.

    Args:
        decoder: Turns tokens into text.
        stop: Strings that end the sequence.
        include_stop: Leave the stop string in the text.
    """

    def __init__(
        self, decoder: Decoder, stop: tuple[str, ...] = (), include_stop: bool = False
    ) -> None:
        self._decoder = decoder
        self._stop = stop
        self._include_stop = include_stop
        self._held = ""  # text that may be the beginning of a stop string
        self.stopped = False

    def append(self, token: int, may_stop: bool = True) -> str:
        """Add a token; text that is certain now. Sets `stopped` at a stop string.

        Text of tokens that may not stop the sequence is never part of a stop string.
        """
        piece = self._decoder.step(token)
        return self._advance(piece, final=False) if may_stop else piece

    def finish(self) -> str:
        """Text held back until now, at the end of the sequence."""
        return self._advance(self._decoder.finish(), final=True)

    def _advance(self, piece: str, final: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + piece
        end = self._find_stop(text)
        self.stopped = end is not None
        if end is None:
            end = len(text) if final else self._find_beginning(text)
        self._held = "" if self.stopped else text[end:]
        return text[:end]

    def _find_stop(self, text: str) -> int | None:
        """Where a stop string makes the text end, or None."""
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if not found:
            return None
        end, start = min(found)
        return end if self._include_stop else start

    def _find_beginning(self, text: str) -> int:
        """Where the longest part at the end that may begin a stop string begins."""
        first = len(text)
        for stop in self._stop:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= at < first:
                if stop.startswith(text[at:]):
                    first = at
                at = text.find(stop[0], at + 1)
        return first
