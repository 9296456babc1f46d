"""Streamed text equals whole text, and stop strings end it wherever tokens cut them."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pw.engine.detokenizer import Decoder, Detokenizer, byte_tokens

TEXTS = (
    "plain words, and more",
    "naïve café — “quoted” …",
    "漢字とかな交じり文、한국어 텍스트",
    "नमस्ते दुनिया",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 thumb",
    "שלום عليكم",
    " leading space\n\n\ttabs\r\n",
    "\u200d\ufe0f lone joiners \ufffd a real replacement character",
)


def byte_level() -> Tokenizer:
    """Ids 0..255 are bytes in the order of the alphabet, 256 is special, 257 and 258 words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.add_tokens(["wörd", "🙂🙃"])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Ids 0..255 are `<0x..>`, then words with `▁` for the space, then a special token."""
    words = ["▁", "▁hello", "▁wor", "ld", "a", "b", "c", "é", "字", "▁the", "\n", "!"]
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary |= {word: 256 + i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


BYTE_LEVEL, BYTE_FALLBACK = byte_level(), byte_fallback()


def bytes_to_ids(data: bytes) -> list[int]:
    """Token ids of raw bytes in the byte-level tokenizer, valid UTF-8 or not."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable}
    characters |= {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [BYTE_LEVEL.token_to_id(characters[byte]) for byte in data]


def decoder(tokenizer: Tokenizer, skip_special_tokens: bool = True) -> Decoder:
    return Decoder(tokenizer, byte_tokens(tokenizer), skip_special_tokens)


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    made = decoder(tokenizer)
    return [*(made.step(token) for token in ids), made.finish()]


def cut(ids: list[int], rng: random.Random) -> list[int]:
    """The same text with whole words and special tokens thrown in between."""
    mixed = []
    for token in ids:
        if rng.random() < 0.1:
            mixed.append(rng.choice([256, 257, 258]))
        mixed.append(token)
    return mixed


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["level", "fallback"])
@pytest.mark.parametrize("text", TEXTS)
def test_every_character_comes_out_whole_and_with_its_last_byte(
    tokenizer: Tokenizer, text: str
) -> None:
    if tokenizer is BYTE_FALLBACK:
        text = text.lstrip(" ")  # its decoder strips the first space of a text
    data = text.encode()
    ids = bytes_to_ids(data) if tokenizer is BYTE_LEVEL else list(data)
    parts = pieces(tokenizer, ids)
    assert "".join(parts) == text == tokenizer.decode(ids)
    for size in range(len(data) + 1):
        ready = data[:size].decode(errors="ignore")
        waits = tokenizer is BYTE_LEVEL and ready.endswith("\ufffd")  # looks like half a character
        assert "".join(parts[:size]) == (ready[:-1] if waits else ready)


def test_any_ids_stream_to_the_whole_decode_of_a_byte_level_tokenizer() -> None:
    rng = random.Random(0)
    size = BYTE_LEVEL.get_vocab_size()
    for _ in range(300):
        ids = [rng.randrange(size) for _ in range(rng.randrange(60))]
        assert "".join(pieces(BYTE_LEVEL, ids)) == BYTE_LEVEL.decode(ids)
    for text in TEXTS:
        ids = cut(bytes_to_ids(text.encode()), rng)
        assert "".join(pieces(BYTE_LEVEL, ids)) == BYTE_LEVEL.decode(ids)


def test_spaces_and_specials_of_a_byte_fallback_tokenizer_stream_to_the_whole_decode() -> None:
    rng = random.Random(1)
    words = range(256, BYTE_FALLBACK.get_vocab_size())
    for _ in range(300):
        ids: list[int] = []
        for _ in range(rng.randrange(12)):
            if rng.random() < 0.4:
                ids += rng.choice(("é", "字", "👍🏽", "x")).encode()
            else:
                ids.append(rng.choice(words))
        assert "".join(pieces(BYTE_FALLBACK, ids)) == BYTE_FALLBACK.decode(ids)


def test_invalid_bytes_neither_stop_nor_hold_the_text() -> None:
    rng = random.Random(2)
    hello = BYTE_FALLBACK.token_to_id("▁hello")
    for _ in range(300):
        ids = [rng.choice((hello, rng.randrange(256))) for _ in range(40)]
        made, shown = decoder(BYTE_FALLBACK), ""
        for number, token in enumerate(ids):
            shown += made.step(token)
            if token == hello:
                assert shown.endswith("hello")
            elif len(set(ids[max(0, number - 3) : number + 1]) & {hello}) == 0 and number >= 3:
                assert shown  # at most three bytes wait for a fourth
        made.finish()
    lone = bytes_to_ids(b"\x80" * 500)
    parts = pieces(BYTE_LEVEL, lone)
    assert "".join(parts) == "\ufffd" * 500
    assert all(len("".join(parts[: i + 1])) >= i for i in range(500))


def test_end_in_the_middle_of_a_character_is_flushed() -> None:
    ids = bytes_to_ids("ok 🙂".encode()[:-1])
    assert pieces(BYTE_LEVEL, ids) == ["o", "k", " ", "", "", "", "\ufffd"]
    assert pieces(BYTE_FALLBACK, list("é🙂".encode()[:-1])) == ["", "é", "", "", "", "\ufffd"]


def test_special_tokens_have_text_only_when_asked_for() -> None:
    ids = [*bytes_to_ids(b"a"), 256, *bytes_to_ids(b"b")]
    shown = decoder(BYTE_LEVEL, skip_special_tokens=False)
    assert "".join(shown.step(token) for token in ids) == "a<end>b"
    hidden = decoder(BYTE_LEVEL)
    assert [hidden.step(token) for token in ids] == ["a", "", "b"]


# -- stop strings ------------------------------------------------------------------------------


def reference(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, bool]:
    """The text up to the stop string that is complete first, character by character."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[: end if include else end - len(max(ended, key=len))], True
    return text, False


class Pieces:
    """A decoder whose tokens are given pieces of text."""

    def __init__(self, parts: list[str]) -> None:
        self.parts = parts

    def step(self, token: int) -> str:
        return self.parts[token]

    def finish(self) -> str:
        return ""


def run(parts: list[str], stops: tuple[str, ...], include: bool) -> tuple[list[str], bool]:
    """What the client got, token by token."""
    made = Detokenizer(Pieces(parts), stops, include)  # type: ignore[arg-type]
    sent = []
    for token in range(len(parts)):
        sent.append(made.append(token))
        if made.stopped:
            break
    sent.append(made.finish())
    return sent, made.stopped


def test_twenty_thousand_random_texts_stop_like_the_reference() -> None:
    rng = random.Random(3)
    for _ in range(20_000):
        text = "".join(rng.choices("ab字\n", k=rng.randrange(24)))
        stops = tuple(
            "".join(rng.choices("ab字\n", k=rng.randrange(1, 5))) for _ in range(rng.randrange(4))
        )
        parts, at = [], 0
        while at < len(text):
            size = rng.randrange(0, 5)
            parts.append(text[at : at + size])
            at += size
        include = rng.random() < 0.3
        sent, stopped = run(parts, stops, include)
        assert ("".join(sent), stopped) == reference(text, stops, include), (parts, stops)


@pytest.mark.parametrize("stop", ["\n\nUser:", "字🙂é", "</s>", "aab"])
def test_stop_cut_at_every_byte_leaks_nothing(stop: str) -> None:
    text = f"so aa{stop} never shown"
    data = text.encode()
    for first in range(len(data)):
        made = Detokenizer(decoder(BYTE_LEVEL), (stop,))
        sent = ""
        for part in (data[:first], data[first:]):
            for token in bytes_to_ids(part):
                sent += made.append(token)
                assert "so aa".startswith(sent)
                if made.stopped:
                    break
        assert made.stopped
        assert sent + made.finish() == reference(text, (stop,), False)[0]


def test_false_start_of_a_stop_is_released_as_soon_as_it_is_false() -> None:
    sent, stopped = run(["x", "<", "/", "a", ">"], ("</s>",), False)
    assert sent == ["x", "", "", "</a", ">", ""]
    assert not stopped
    assert run(["x", "</"], ("</s>",), False)[0] == ["x", "", "</"]


def test_tokens_that_may_not_stop_pass_stop_strings_on() -> None:
    made = Detokenizer(Pieces(["a", "END", "b", "END"]), ("END",))  # type: ignore[arg-type]
    assert [made.append(0, may_stop=False), made.append(1, may_stop=False)] == ["a", "END"]
    assert [made.append(2), made.append(3)] == ["b", ""]
    assert made.stopped
