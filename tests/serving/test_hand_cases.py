"""Every field of every body times everything wrong: no 5xx, one error shape, the next is fine.

A case is a body with one field replaced, or one sent as bytes. An answer of 200 must be one that
OpenAI's schema knows; each case may be right, none may break anything.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.serving.conftest import serving
from tests.serving.fakes import FakeEngine, WordTokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGE = {"role": "user", "content": "1"}
GOOD: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "1", "max_tokens": 2},
    CHAT: {"messages": [MESSAGE], "max_tokens": 2},
    "/tokenize": {"prompt": "1"},
    "/detokenize": {"tokens": [1]},
}
SHARED = [
    "model", "n", "stream", "stream_options", "max_tokens", "temperature", "top_p", "top_k",
    "min_p", "seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos",
    "min_tokens", "skip_special_tokens", "spaces_between_special_tokens", "frequency_penalty",
    "presence_penalty", "repetition_penalty", "logit_bias", "prompt_logprobs",
    "return_tokens_as_token_ids", "precision", "response_format", "structured_outputs",
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "logprobs", "user",
    "unknown_field",
]  # fmt: skip
FIELDS = {
    COMPLETIONS: [*SHARED, "prompt", "echo", "best_of", "suffix", "add_special_tokens"],
    CHAT: [
        *SHARED, "messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice",
        "parallel_tool_calls", "add_generation_prompt", "continue_final_message",
        "chat_template_kwargs", "chat_template", "reasoning_effort", "add_special_tokens",
    ],
    "/tokenize": ["prompt", "messages", "add_special_tokens", "model", "tools"],
    "/detokenize": ["tokens", "model"],
}  # fmt: skip
ANYTHING: list[Any] = [
    None, True, False, 0, -1, 1, 2, 17, 2**31, -(2**31), 2**53, 2**63 - 1, 2**63, 2**64 - 1, 0.5,
    -0.0, 1e-320, 1e308, "", "5", "x", "null", "\x00", "a\x00b", "\ufeff", "\u202e", "\U0010ffff",
    "x" * 5000, "../../etc/passwd", "{{ 1 / 0 }}", "%s%n", "' OR 1=1 --", [], [None], [1], [-1],
    [2**63], ["x"], [""], [[1]], [[]], [{}], [True], [1.5], ["x"] * 300, {}, {"x": 1}, {"1": 1},
    {"1": None}, {"": ""}, {"type": "object"}, {"min_bits": 2}, {"include_usage": 5},
]  # fmt: skip
NUMBERS = ["NaN", "Infinity", "-Infinity", "1e400", "-1e400", "9" * 400, "0x10", "01", "1.", "+1"]
CASES = [
    (path, field, value)
    for path, fields in FIELDS.items()
    for field in fields
    for value in ANYTHING
]


@pytest.fixture(scope="module")
def served():
    with serving(FakeEngine(), WordTokenizer()) as running:
        yield running


@pytest.fixture(autouse=True)
def still_fine(served):
    yield
    assert served.context.gate.open_sequences == 0
    answer = served.openai.completions.create(model="fake", prompt="1", max_tokens=1)
    assert answer.choices[0].text == "The "


def post(served, path, content):
    return served.http.post(path, content=content, headers={"content-type": "application/json"})


def check(answer, what):
    """A right answer, or an error in OpenAI's shape that is the client's."""
    assert answer.status_code in (200, 400, 404, 413), (what, answer.text)
    if answer.status_code == 200:
        return
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}, what
    assert error["type"] == "invalid_request_error"
    assert error["message"].isprintable(), what
    assert len(answer.content) < 5000, what


@pytest.mark.slow
def test_thousands_of_bodies(served):
    assert len(CASES) > 4500
    for path, field, value in CASES:
        body = json.dumps(GOOD[path] | {field: value})
        check(post(served, path, body), (path, field, value))


@pytest.mark.parametrize("count", [300, pytest.param(16_000, marks=pytest.mark.figures)])
def test_several_wrong_fields_at_once(served, count):
    """[B3] With those above, 20,000 bodies."""
    chance = random.Random(count)
    for number in range(count):
        path = chance.choice(list(FIELDS))
        fields = chance.sample(FIELDS[path], chance.randint(2, min(5, len(FIELDS[path]))))
        body = GOOD[path] | {field: chance.choice(ANYTHING) for field in fields}
        check(post(served, path, json.dumps(body)), (path, body))
        if number % 1000 == 0:
            assert served.http.get("/health/ready").status_code == 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_numbers_that_json_does_not_know(served, path):
    for field in ("temperature", "max_tokens", "seed", "frequency_penalty", "n", "logprobs"):
        for number in NUMBERS:
            body = json.dumps(GOOD[path])[:-1] + f', "{field}": {number}}}'
            answer = post(served, path, body)
            check(answer, (path, field, number))
            assert answer.status_code == 400, (path, field, number)


def nested(opening, closing, depth, inner="1"):
    return opening * depth + inner + closing * depth


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize("depth", [100, 500, 1_100, 10_000])
def test_depth(served, path, depth):
    good = json.dumps(GOOD[path])[:-1]
    for value in (nested("[", "]", depth), nested('{"a":', "}", depth)):
        for field in ("unknown_field", *FIELDS[path][-3:], "response_format", "tools", "messages"):
            check(post(served, path, f'{good}, "{field}": {value}}}'), (path, field, depth))
    for body in (nested("[", "]", depth), nested("[", "", depth), nested('{"prompt":', "}", depth)):
        answer = post(served, path, body)
        check(answer, (path, body[:10], depth))
        assert answer.status_code == 400


@pytest.mark.parametrize("path", GOOD)
def test_bytes_that_are_no_json(served, path):
    good = json.dumps(GOOD[path]).encode()
    for body in (
        b"", b" ", b"\x00", b"\xff\xfe\x00", b"\xef\xbb\xbf" + good, good.decode().encode("utf-16"),
        good[:-1], good + good, good + b"x", good.replace(b'"', b"'"), b'{"prompt": "\xc3\x28"}',
        b'{"prompt": "\\ud800"}', b'{"prompt": "\\udc00\\ud800"}', b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "a\nb"}', b"{'a'}", b"<xml/>", b"prompt=1", b"\x1f\x8b" + good, b"[" * 9999,
        b'"' + b"x" * 100_000,
    ):  # fmt: skip
        answer = post(served, path, body)
        check(answer, body[:40])
        assert answer.status_code == 400, body[:40]


def test_the_same_key_twice_and_keys_of_every_kind(served):
    for body in (
        '{"prompt": "1", "prompt": "2", "max_tokens": 1}',
        '{"prompt": "1", "": 1, "\\u0000": 2, "__proto__": {}, "constructor": 3, "max_tokens": 1}',
        json.dumps({"prompt": "1", "max_tokens": 1} | {f"key{i}": i for i in range(5000)}),
    ):
        answer = post(served, COMPLETIONS, body)
        assert answer.status_code == 200, answer.text


def test_headers_of_every_kind(served):
    body = json.dumps(GOOD[COMPLETIONS])
    for headers in (
        {"content-type": "text/plain"},
        {"content-type": "application/json; charset=utf-16"},
        {"content-type": "application/json", "content-encoding": "gzip"},
        {"content-type": ""},
        {"content-type": "x" * 5000},
        {"content-type": "application/json", "x-request-id": "a\tb" * 500},
        {"content-type": "application/json", "accept": "text/html"},
        {"content-type": "multipart/form-data"},
    ):
        check(served.http.post(COMPLETIONS, content=body, headers=headers), headers)


@pytest.mark.parametrize("prompt", [
    [7] * 4095, [7] * 4096, [7] * 4097, [[7] * 4096, [7]], ["7"] * 257, [[7]] * 257,
    "7 " * 1_000_000, "x" * 1_000_000, [0, 999], [1000], [-1], [2**31], [2**63], [[1], [1000]],
    ["7", ""], [[7], []], [[[7]]], [["7"]], [7, "7"], [None], [{}], [7.0],
])  # fmt: skip
def test_prompts_at_their_limits(served, prompt):
    answer = served.http.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 1})
    check(answer, str(prompt)[:40])
    right = prompt in ([7] * 4095, [0, 999], "x" * 1_000_000)  # the last is one word
    assert (answer.status_code == 200) == right, answer.text[:300]
