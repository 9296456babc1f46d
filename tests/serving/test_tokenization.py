"""`/tokenize`, `/detokenize` and `/tokenizer_info`, as lm-eval's remote tokenizer calls them."""

from __future__ import annotations

from pathlib import Path

import pytest

import pw
from pw.models.tokenizer import load_tokenizer
from tests.serving.conftest import serving
from tests.serving.fakes import FakeEngine

TINY = Path(pw.__file__).parent / "assets" / "moe-tiny"


@pytest.fixture(scope="module")
def real():
    """The bundled model's tokenizer before a fake engine."""
    with serving(FakeEngine(), load_tokenizer(TINY)) as running:
        yield running


def post(served, path, **body):
    answer = served.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_there_and_back(real):
    for text in ("", "Once upon a time", "naïve 🦊 日本語\n"):
        tokenized = post(real, "/tokenize", prompt=text, add_special_tokens=False)
        assert tokenized["count"] == len(tokenized["tokens"])
        assert tokenized["max_model_len"] == 4096
        assert post(real, "/detokenize", tokens=tokenized["tokens"]) == {"prompt": text}


def test_conversation_and_strings_of_tokens(real):
    messages = [{"role": "user", "content": "hi"}]
    tokenized = post(
        real, "/tokenize", model="fake", messages=messages, return_token_strs=True,
        add_generation_prompt=False,
    )  # fmt: skip
    assert "".join(tokenized["token_strs"]) == "<|im_start|>user\nhi<|im_end|>\n"
    longer = post(real, "/tokenize", messages=messages)
    assert longer["tokens"][: tokenized["count"]] == tokenized["tokens"]


def test_info(real):
    info = real.http.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|endoftext|>"
    assert post(real, "/detokenize", tokens=[info["eos_token_id"]])["prompt"] == info["eos_token"]
    assert "<|im_start|>" in info["chat_template"]
    assert info["bos_token"] is None


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": "a", "messages": [{"role": "user", "content": "a"}]},
        {"prompt": 5},
        {"messages": []},
        {"messages": [{"role": "nobody", "content": "a"}]},
    ],
)
def test_bad_texts(real, body):
    answer = real.http.post("/tokenize", json=body)
    assert (answer.status_code, set(answer.json())) == (400, {"error"})


@pytest.mark.parametrize("tokens", [None, "1", [-1], [2**31], [2**63], [1.5], [True], ["1"]])
def test_bad_ids(real, tokens):
    answer = real.http.post("/detokenize", json={"tokens": tokens})
    assert (answer.status_code, set(answer.json())) == (400, {"error"})


def test_unknown_model(real):
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": []})):
        assert real.http.post(path, json=body | {"model": "other"}).status_code == 404
