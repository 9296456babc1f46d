"""Log-probabilities as the two endpoints spell them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from pw.engine.request import TokenLogprob
from pw.serving.process.engine_protocol import TokenizerProtocol

LOGPROB_FLOOR = -9999.0  # stands for -inf, which JSON cannot write
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in of each byte -> the byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + place): byte for place, byte in enumerate(others)
    }


class TokenTexts:
    """Text and bytes of single tokens, remembered.

    Args:
        tokenizer: The model's.
        by_id: Spell tokens as `token_id:123`, so that no two look alike.
    """

    def __init__(self, tokenizer: TokenizerProtocol, *, by_id: bool = False) -> None:
        self._tokenizer = tokenizer
        self._by_id = by_id
        self._bytes: dict[int, bytes] = {}
        self._alphabet = _byte_level_alphabet()

    def raw(self, token_id: int) -> bytes:
        """The bytes a token adds to a text; a part of a character stays a part."""
        if token_id not in self._bytes:
            self._bytes[token_id] = self._find(token_id)
        return self._bytes[token_id]

    def text(self, token_id: int) -> str:
        r"""The token as JSON can hold it: `bytes:\xNN...` when it is no whole characters."""
        if self._by_id:
            return f"token_id:{token_id}"
        raw = self.raw(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _find(self, token_id: int) -> bytes:
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        spelling = self._tokenizer.spelling(token_id)
        if match := _BYTE_FALLBACK.fullmatch(spelling):
            return bytes([int(match[1], 16)])
        if "\ufffd" in text and all(mark in self._alphabet for mark in spelling):
            return bytes(self._alphabet[mark] for mark in spelling)
        if spelling.startswith("▁") and not text.startswith(" "):
            text = " " + text  # SentencePiece drops the space that opens a text
        return text.encode()


class CompletionLogprobs:
    """The four parallel lists of `/v1/completions`, with offsets that run on over chunks.

    Args:
        texts: Spells tokens.
        alternatives: Likeliest tokens in `top_logprobs`; the token itself is always there.
    """

    def __init__(self, texts: TokenTexts, alternatives: int) -> None:
        self._texts = texts
        self._alternatives = alternatives
        self._offset = 0

    def lists(
        self,
        rows: Sequence[tuple[int, TokenLogprob | None]],
    ) -> dict[str, Any]:
        """Lists over the next tokens, of the prompt and sampled; the first has no entry."""
        texts = [self._texts.text(token_id) for token_id, _ in rows]
        starts = list(accumulate(map(len, texts), initial=self._offset))
        self._offset = starts.pop()
        return {
            "tokens": texts,
            "token_logprobs": [
                None if entry is None else finite(entry.logprob) for _, entry in rows
            ],
            "top_logprobs": [
                None if entry is None else self._top(text, entry)
                for text, (_, entry) in zip(texts, rows, strict=True)
            ],
            "text_offset": starts,
        }

    def _top(self, text: str, entry: TokenLogprob) -> dict[str, float]:
        top: dict[str, float] = {}
        # Falling, so that of equal texts the likelier stays.
        for token_id, logprob in entry.top[: self._alternatives]:
            top.setdefault(self._texts.text(token_id), finite(logprob))
        top.setdefault(text, finite(entry.logprob))
        return top


def chat_logprobs(texts: TokenTexts, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The `logprobs` object of a chat choice."""

    def one(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": texts.text(token_id),
            "logprob": finite(logprob),
            "bytes": list(texts.raw(token_id)),
        }

    content = [
        one(entry.token_id, entry.logprob)
        | {"top_logprobs": [one(token_id, logprob) for token_id, logprob in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def prompt_logprob_maps(
    texts: TokenTexts, entries: Sequence[TokenLogprob | None], alternatives: int
) -> list[dict[str, Any] | None]:
    """VLLM's `prompt_logprobs`: for each prompt token its own entry and the likeliest, by id."""

    def mapped(entry: TokenLogprob) -> dict[str, Any]:
        places = {
            token_id: {"logprob": finite(logprob), "rank": rank}
            for rank, (token_id, logprob) in enumerate(entry.top[:alternatives], start=1)
        }
        own = {"logprob": finite(entry.logprob), "rank": None}  # its rank is not computed
        return {
            str(token_id): place | {"decoded_token": texts.text(token_id)}
            for token_id, place in ({entry.token_id: own} | places).items()
        }

    return [None if entry is None else mapped(entry) for entry in entries]


def finite(logprob: float) -> float:
    """The value, or the floor where it is lower or no number."""
    return max(LOGPROB_FLOOR, logprob)
