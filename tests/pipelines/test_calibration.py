import json
from pathlib import Path
from typing import Any

import pytest

from pw.config import CalibrationConfig
from pw.errors import ConfigError, RequestError
from pw_pipelines.calibration import bos_prefix, calibration_set, cut_windows, load_documents


class Bytes:
    """A tokenizer of bytes; begins a text with 256 where told to, and has a plain chat template."""

    def __init__(self, begins: bool = False) -> None:
        self.begins = begins

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [256] * (self.begins and add_special_tokens) + list(text.encode())

    def render_chat(self, messages: Any, *, add_generation_prompt: bool) -> str:
        assert not add_generation_prompt
        if messages[0]["role"] == "tool":
            raise RequestError("no tools here")
        return "".join(f"<{m['role']}>{m['content']}" for m in messages)


def settings(path: Path, **values: Any) -> CalibrationConfig:
    return CalibrationConfig(**{"dataset": str(path), "nsamples": 4, "seqlen": 8, **values})


def jsonl(path: Path, *records: object) -> Path:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records))
    return path


def test_text_and_messages_become_windows(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "abcdefgh"}]
    path = jsonl(tmp_path / "a.jsonl", {"text": "0123456789"}, "", "  ", {"messages": chat})
    found = calibration_set(settings(path), Bytes())
    texts = {bytes(w).decode() for w in found.windows.tolist()}
    assert texts == {"01234567", "<user>ab", "89cdefgh"}
    assert found.available == 3


def test_plain_text_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("\ufeffone\n\ntwo three four", "utf-8")
    assert load_documents(str(path)) == ["one\n\ntwo three four"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.jsonl", b"", "holds no text"),
        ("blank.jsonl", b" \n\n\t\n", "holds no text"),
        ("blank.txt", b" \n\t ", "holds no text"),
        ("blanks.jsonl", b'{"text": "  "}\n{"messages": []}', "holds no text"),
        ("broken.jsonl", b'{"text": "a"}\n{"text": ', "line 2 of .* is not JSON"),
        ("list.jsonl", b'["text"]', "line 1 of .* has no string `text`"),
        ("number.jsonl", b'{"text": 3}', "line 1 of .* has no string `text`"),
        ("roles.jsonl", b'{"messages": [{"content": "x"}]}', "line 1 of .* has no string `text`"),
        ("latin.txt", b"caf\xe9 au lait", "not UTF-8 at byte 3"),
        ("table.csv", b"text\nabc", "unknown kind of text file"),
        ("short.txt", b"abc", "holds 3 tokens, one window takes 8"),
        ("tools.jsonl", b'{"messages": [{"role": "tool"}]}', "no tools here"),
    ],
)
def test_a_bad_file_is_refused_with_its_fault(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        calibration_set(settings(path), Bytes())


def test_a_token_that_the_model_does_not_know_is_refused(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"text": "aaaazaaaaaaa"})
    calibration_set(settings(path), Bytes(), ord("z") + 1)
    with pytest.raises(ConfigError, match=r"has token 122, the model knows 122, .*a\.jsonl"):
        calibration_set(settings(path), Bytes(), ord("z"))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_documents(str(tmp_path / "none.jsonl"))


def test_ends_of_documents_are_joined_and_count_to_the_first() -> None:
    documents = [range(10), range(20, 25), range(30, 33), range(40, 58)]
    found = cut_windows(documents, CalibrationConfig(nsamples=9, seqlen=8))
    by_document = sorted(zip(found.documents, found.windows.tolist(), strict=True))
    assert by_document == [
        (0, [0, 1, 2, 3, 4, 5, 6, 7]),
        (0, [8, 9, 20, 21, 22, 23, 24, 30]),
        (3, [40, 41, 42, 43, 44, 45, 46, 47]),
        (3, [48, 49, 50, 51, 52, 53, 54, 55]),
    ]


def test_the_draw_depends_on_the_seed_alone() -> None:
    documents = [range(800)]
    first, again, other = (
        cut_windows(documents, CalibrationConfig(nsamples=20, seqlen=8, seed=seed))
        for seed in (1, 1, 2)
    )
    assert first.digest == again.digest != other.digest
    assert len({tuple(w) for w in first.windows.tolist()}) == 20
    assert first.available == 100


def test_every_window_begins_as_the_tokenizer_begins_a_text(tmp_path: Path) -> None:
    assert bos_prefix(Bytes()) == []
    path = tmp_path / "a.txt"
    path.write_text("x" * 40)
    windows = calibration_set(settings(path), Bytes(begins=True)).windows
    assert windows.shape == (4, 8)
    assert (windows[:, 0] == 256).all()
    assert (windows[:, 1:] == ord("x")).all()


def test_the_bundled_text_is_there() -> None:
    documents = load_documents("bundled")
    assert len(documents) >= 20
    assert sum(len(d) for d in documents) > 200_000
