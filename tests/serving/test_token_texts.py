"""Texts of single tokens of the bundled byte-level tokenizer, and of SentencePiece spellings."""

from __future__ import annotations

from pathlib import Path

import pytest

import pw
from pw.engine.request import TokenLogprob
from pw.models.tokenizer import load_tokenizer
from pw.serving.openai.logprobs import CompletionLogprobs, TokenTexts
from tests.serving.fakes import WordTokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(Path(pw.__file__).parent / "assets" / "moe-tiny")


@pytest.mark.parametrize(
    "text",
    ["Hello world", "naïve café", "🦊 and 👩‍👩‍👧‍👦", "नमस्ते दुनिया", "日本語", "\t\n  x", "e\u0301"],
)
def test_bytes_of_tokens_add_up_to_the_text(tokenizer, text):
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode(text)
    assert b"".join(map(texts.raw, ids)).decode() == text


def test_part_of_a_character_is_told_as_bytes(tokenizer):
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode("🦊")
    assert len(ids) > 1
    assert all(texts.text(token).startswith("bytes:\\x") for token in ids)
    assert texts.text(ids[0]).startswith("bytes:\\xf0")
    assert len({texts.text(token) for token in ids}) == len(ids)  # no two overwrite each other


def test_special_tokens_keep_their_name(tokenizer):
    texts = TokenTexts(tokenizer)
    assert [texts.text(token) for token in tokenizer.eos_token_ids] == [
        tokenizer.spelling(token) for token in tokenizer.eos_token_ids
    ]


class SentencePiece(WordTokenizer):
    """Spells as SentencePiece does: a leading space is dropped at the start of a text."""

    pieces = ("▁the", "re", "<0xF0>", "<0x9F>")

    def spelling(self, token_id):
        return self.pieces[token_id]

    def decode(self, ids, *, skip_special_tokens=True):
        return ("the", "re", "\ufffd", "\ufffd")[ids[0]]


def test_sentencepiece_spellings():
    texts = TokenTexts(SentencePiece())
    assert [texts.raw(token) for token in range(4)] == [b" the", b"re", b"\xf0", b"\x9f"]


def test_equal_texts_keep_the_likelier():
    class Doubles(WordTokenizer):
        def spelling(self, token_id):
            return "same"

    entry = TokenLogprob(3, -5.0, ((1, -0.5), (2, -0.75)))
    lists = CompletionLogprobs(TokenTexts(Doubles()), 5).lists([(3, entry)])
    assert lists["top_logprobs"] == [{"same ": -0.5}]


def test_chosen_token_is_in_the_map_and_floor_is_finite():
    entry = TokenLogprob(9, float("nan"), ((1, -0.5), (2, -float("inf"))))
    lists = CompletionLogprobs(TokenTexts(WordTokenizer()), 2).lists(
        [(0, None), (1, TokenLogprob(1, -2.0)), (9, entry)]
    )
    assert lists["token_logprobs"] == [None, -2.0, -9999.0]
    assert lists["top_logprobs"] == [
        None,
        {"🦊 ": -2.0},
        {"🦊 ": -0.5, "jumps ": -9999.0, "then ": -9999.0},
    ]
    assert lists["text_offset"] == [0, 4, 6]
