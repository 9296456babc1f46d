"""Tokenizer: round trips, end ids, and templates that refuse in their own words (H22)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pw.errors import ModelError, RequestError
from pw.models.resolve import resolve_model
from pw.models.tokenizer import load_tokenizer

SENTENCE = "Conversation roles must alternate user/assistant/user/assistant/..."
TEMPLATE = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('" + SENTENCE + "') }}{% endif %}{{ m['content'] }}{% endfor %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The bundled model's files but its weights."""
    for file in resolve_model("tiny").iterdir():
        if file.suffix != ".safetensors":
            shutil.copyfile(file, tmp_path / file.name)
    return tmp_path


def test_text_comes_back_and_chat_is_the_models_template() -> None:
    tokenizer = load_tokenizer(resolve_model("tiny"))
    text = "Grüße, 世界! 🎉  two blanks"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == 4096
    assert tokenizer.has_chat_template
    messages = [{"role": "user", "content": "hello"}]
    ids = tokenizer.encode_chat(messages)
    expected = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected
    assert tokenizer.render_chat(messages, add_generation_prompt=False) == expected.removesuffix(
        "<|im_start|>assistant\n"
    )


def test_end_ids_are_those_of_the_generation_config_and_the_tokenizer(folder: Path) -> None:
    assert load_tokenizer(folder).eos_token_ids == (0, 2)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert load_tokenizer(folder).eos_token_ids == (0, 7)
    (folder / "generation_config.json").unlink()
    assert load_tokenizer(folder).eos_token_ids == (0,)


def test_a_template_refuses_in_its_own_words(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = load_tokenizer(folder)
    with pytest.raises(RequestError) as caught:
        tokenizer.encode_chat([{"role": "system", "content": "x"}])
    assert caught.value.status == 400
    assert SENTENCE in caught.value.message
    assert caught.value.param == "messages"
    with pytest.raises(RequestError):
        tokenizer.encode_chat([{"role": "user"}, {"role": "user", "content": None}])


def test_a_model_without_template_refuses_chat(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_bytes())
    config.pop("chat_template")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(RequestError, match="no chat template"):
        load_tokenizer(folder).encode_chat([{"role": "user", "content": "x"}])


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no readable tokenizer") as caught:
        load_tokenizer(tmp_path)
    assert "it has none of tokenizer.json" in caught.value.message
    assert "\n" not in caught.value.message
    assert "beside its config.json" in caught.value.hint


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json"])
def test_a_git_lfs_pointer_is_told_apart(folder: Path, name: str) -> None:
    (folder / name).write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 9\n"
    )
    with pytest.raises(ModelError, match=f"a git-lfs pointer to it: `{folder / name}`") as caught:
        load_tokenizer(folder)
    assert "lfs pull" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a readable file"),
        ("[]", "not a readable file"),
        ('{"eos_token_id": "</s>"}', "is no id: `</s>`"),
        ('{"eos_token_id": [1, true]}', "is no id: `[1, True]`"),
    ],
)
def test_a_generation_config_that_says_nonsense_is_refused(
    folder: Path, text: str, message: str
) -> None:
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(ModelError) as caught:
        load_tokenizer(folder)
    assert message in caught.value.message
    assert caught.value.hint
