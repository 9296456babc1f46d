"""Bad input: a 400 in OpenAI's shape, nothing reaches the engine, the next request is fine."""

from __future__ import annotations

import json
import logging
from typing import get_args, get_type_hints

import pytest

from pw.serving.context import ServingConfig
from pw.serving.limits import ServingLimits
from pw.serving.openai.chat_schemas import ChatRequest, TokenizeRequest
from pw.serving.openai.schemas import CompletionRequest
from tests.serving.fakes import FakeEngine, WordTokenizer

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "1"}


def check_error(answer, status, code=None, param=None):
    """The error object, complete and of this status."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    assert error["message"]
    assert "Traceback" not in answer.text
    if code:
        assert error["code"] == code
    if param:
        assert error["param"] == param
    return error["message"]


@pytest.fixture(autouse=True)
def engine_lives_on(served):
    served.engine.calls.clear()
    yield
    assert not served.engine.calls
    assert served.context.gate.open_sequences == 0
    answer = served.openai.completions.create(model="fake", prompt="1", max_tokens=1)
    assert answer.choices[0].text == "The "


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", None),
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", ""),
        ("prompt", [""]),
        ("prompt", " \n"),
        ("prompt", ["1", ""]),
        ("prompt", [1, "1"]),
        ("prompt", [1.5]),
        ("prompt", [True]),
        ("prompt", {"text": "1"}),
        ("prompt", [1, -1]),
        ("prompt", [1000]),
        ("prompt", [[1], [2**70]]),
        ("n", 0),
        ("n", -1),
        ("n", 17),
        ("n", 2**40),
        ("n", "2"),
        ("n", True),
        ("best_of", 2),
        ("max_tokens", -1),
        ("max_tokens", 0),
        ("max_tokens", 2**70),
        ("max_tokens", 1.5),
        ("temperature", -0.1),
        ("temperature", 2.5),
        ("temperature", "warm"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 2),
        ("seed", 2**63),
        ("seed", 1.5),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["a"] * 17),
        ("stop", "x" * 5000),
        ("stop", 5),
        ("stop_token_ids", [1] * 129),
        ("logprobs", 21),
        ("logprobs", -1),
        ("min_tokens", -1),
        ("stream", "maybe"),
        ("suffix", "and then"),
        ("logit_bias", {"-1": 5}),
        ("logit_bias", {"abc": 1}),
        ("logit_bias", {"5.0": 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"5": "x"}),
        ("logit_bias", {str(token): 1 for token in range(1025)}),
        ("logit_bias", {"9" * 19: 1}),
        ("frequency_penalty", 2.5),
        ("presence_penalty", -2.5),
        ("repetition_penalty", 0),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", -1),
        ("precision", {"min_bits": 0}),
        ("precision", {"bits": 4}),
        ("chat_template", "{{ messages }}"),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("truncate_prompt_tokens", 5),
        ("response_format", {"type": "yaml"}),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}),
        ("response_format", {"type": "json_object"}),  # no compiler is set up here
    ],
)
def test_field_that_cannot_be_honoured(served, field, value):
    body = {"model": "fake", "prompt": "1 2 3", field: value}
    check_error(served.http.post(COMPLETIONS, json=body), 400, param=field)


@pytest.mark.parametrize("value", ["yes", "true", "0", 1, 0, 0.0, [], {}])
@pytest.mark.parametrize(
    ("path", "kind"),
    [(COMPLETIONS, CompletionRequest), (CHAT, ChatRequest), ("/tokenize", TokenizeRequest)],
)
def test_only_true_and_false_are_true_and_false(served, path, kind, value):
    body = {"prompt": "1"} if path == COMPLETIONS else {"messages": [USER]}
    kinds = get_type_hints(kind)
    flags = [name for name in kind.model_fields if bool in (kinds[name], *get_args(kinds[name]))]
    assert len(flags) >= 4
    for name in flags:
        check_error(served.http.post(path, json=body | {name: value}), 400, param=name)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"stream_options": {"include_usage": "yes"}, "stream": True}),
        (COMPLETIONS, {"structured_outputs": {"json_object": 1}}),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": "yes"}}}),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "strict": "no"}}]}),
    ],
)
def test_only_true_and_false_are_true_and_false_inside_objects(served, path, body):
    whole = {"prompt": "1", "messages": [USER]} | body
    check_error(served.http.post(path, json=whole), 400, param=next(iter(body)))


def test_whole_numbers_are_numbers(served):
    body = {"prompt": "1", "max_tokens": 1, "temperature": 1, "top_p": 1, "logit_bias": {"5": 1}}
    assert served.http.post(COMPLETIONS, json=body).status_code == 200
    served.engine.calls.clear()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "1", "max_tokens": 2}),
        (CHAT, {"messages": [{"role": "user", "content": "1"}], "max_tokens": 2}),
        (CHAT, {"messages": [{"role": "user", "content": "1"}], "max_completion_tokens": 2}),
    ],
)
def test_more_tokens_than_may_come(served, path, body):
    assert served.http.post(path, json=body | {"min_tokens": 2}).status_code == 200
    served.engine.calls.clear()
    answer = served.http.post(path, json=body | {"min_tokens": 3})
    message = check_error(answer, 400, param="min_tokens")
    assert message == "min_tokens must be at most max_tokens (2): 3"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p"])
def test_numbers_that_are_none(served, number, field):
    body = f'{{"prompt": "1", "{field}": {number}}}'
    answer = served.http.post(
        COMPLETIONS, content=body, headers={"content-type": "application/json"}
    )
    check_error(answer, 400)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"prompt": "\\ud800", "messages": [{"role": "user", "content": "1"}]}',
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"model": "fake"}',
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_bodies_that_are_no_request(served, path, content):
    answer = served.http.post(path, content=content, headers={"content-type": "application/json"})
    check_error(answer, 400)


def test_body_of_another_type(served):
    answer = served.http.post(COMPLETIONS, content=b'{"prompt": "1"}')
    assert "application/json" in check_error(answer, 400)


def test_context_length_is_told_with_the_numbers(served):
    body = {"prompt": [7] * 4000, "max_tokens": 97}
    message = check_error(
        served.http.post(COMPLETIONS, json=body), 400, "context_length_exceeded", "max_tokens"
    )
    assert all(number in message for number in ("4096", "4097", "4000", "97"))
    body = {"prompt": [7] * 4096}
    check_error(served.http.post(COMPLETIONS, json=body), 400, "context_length_exceeded", "prompt")


def test_product_of_choices_and_prompts_is_bounded(served):
    body = {"prompt": ["1"] * 17, "n": 16}
    assert "256" in check_error(served.http.post(COMPLETIONS, json=body), 400, param="prompt")


def test_conversation_is_bounded(served):
    body = {"messages": [{"role": "user", "content": "1"}] * 4097}
    assert "4096" in check_error(served.http.post(CHAT, json=body), 400, param="messages")


def test_a_text_that_must_be_too_long_is_not_even_encoded(served):
    served.context.encoder._longest_token, before = 4, served.context.encoder._longest_token
    body = {"prompt": ["1", "x" * 16385]}
    message = check_error(
        served.http.post(COMPLETIONS, json=body), 400, "context_length_exceeded", "prompt"
    )
    served.context.encoder._longest_token = before
    assert all(number in message for number in ("4096", "16385", "4097"))


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_text_of_megabytes_is_not_encoded_whole(served, monkeypatch, path):
    encoded = []

    def encode(text, *, add_special_tokens=True):
        encoded.append(len(text))
        return [1] * (len(text) // 2)

    monkeypatch.setattr(served.context.encoder._tokenizer, "encode", encode)
    text = "1 " * 1_000_000
    messages = [{"role": "user", "content": [{"type": "text", "text": text}]}]
    body = {"prompt": text} if path == COMPLETIONS else {"messages": messages}
    param = "prompt" if path == COMPLETIONS else "messages"
    check_error(served.http.post(path, json=body), 400, "context_length_exceeded", param)
    assert encoded == [16384] * 2


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_a_template_that_blows_a_conversation_up_is_refused(served, monkeypatch, path):
    tokenizer = served.context.encoder._tokenizer
    monkeypatch.setattr(tokenizer, "render_chat", lambda messages, **options: "x" * (33 << 20))
    monkeypatch.delattr(type(tokenizer), "encode")
    body = {"messages": [{"role": "user", "content": "1"}]}
    message = check_error(served.http.post(path, json=body), 400, param="messages")
    assert "34603008" in message


def test_a_strict_server_names_the_unknown_field(start):
    with start(config=ServingConfig(("fake",), strict=True)) as served:
        body = {"prompt": "1", "user": "me", "a_field_of_tomorrow": 1}
        answer = served.http.post(COMPLETIONS, json=body)
        message = check_error(answer, 400, "unknown_parameter", "a_field_of_tomorrow")
        assert "a_field_of_tomorrow" in message
        del body["a_field_of_tomorrow"]
        assert served.http.post(COMPLETIONS, json=body).status_code == 200


@pytest.mark.parametrize(("log", "lines"), [(False, 0), (True, 1)])
def test_prompts_are_logged_only_when_asked_for_and_cut(start, caplog, log, lines):
    caplog.set_level(logging.INFO, "pw.serving")
    with start(config=ServingConfig(("fake",), log_prompts=log, max_log_len=9)) as served:
        served.http.post(COMPLETIONS, json={"prompt": "100 200 300", "max_tokens": 1})
    found = [record.getMessage() for record in caplog.records if "100" in record.getMessage()]
    assert len(found) == lines
    assert all("prompt '100 200 3'," in text for text in found)


def test_long_input_is_not_sent_back(served):
    answer = served.http.post(COMPLETIONS, json={"prompt": "1", "model": "m" * 100_000})
    check_error(answer, 404, "model_not_found")
    assert len(answer.content) < 1500


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v2/nothing", 404), ("GET", COMPLETIONS, 405), ("GET", "/v1/models/x", 404)],
)
def test_routes_that_do_not_exist(served, method, path, status):
    check_error(served.http.request(method, path), status)


def test_top_logprobs_need_logprobs(served):
    body = {"messages": [{"role": "user", "content": "1"}], "top_logprobs": 2}
    check_error(served.http.post(CHAT, json=body), 400, param="top_logprobs")


@pytest.mark.parametrize("chunked", [False, True])
def test_body_over_the_bound(start, chunked):
    config = ServingConfig(("fake",), limits=ServingLimits(max_body_bytes=10_000))
    with start(config=config) as served:
        data = json.dumps({"prompt": "1 " * 6000}).encode()
        pieces = (data[i : i + 1000] for i in range(0, len(data), 1000))
        answer = served.http.post(
            COMPLETIONS,
            content=pieces if chunked else data,
            headers={"content-type": "application/json"},
        )
        check_error(answer, 413, "request_too_large")
        assert served.http.post(COMPLETIONS, json={"prompt": "1 " * 100}).status_code == 200


def test_empty_prompt_where_the_model_has_a_bos(start):
    tokenizer = WordTokenizer()
    tokenizer.bos_token_id = 3
    with start(FakeEngine(), tokenizer) as served:
        served.http.post(COMPLETIONS, json={"prompt": ["", "1"], "max_tokens": 1})
        assert sorted(ids for ids, _ in served.engine.calls.values()) == [[1], [3]]
