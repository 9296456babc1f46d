"""Chat templates: the sandbox, the time they get, tools, roles, and the calls they read back."""

from __future__ import annotations

import json
import time

import pytest

from pw.errors import RequestError
from pw.models import tokenizer as tokenizers
from pw.models.resolve import resolve_model
from pw.models.tokenizer import Tokenizer, load_tokenizer
from support.patience import allowed

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_model("tiny"))


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages.__init__.__globals__ }}", "unsafe"),
        ("{% for a in range(10**9) %}{% endfor %}", "[Rr]ange too big"),
        ("{{ 1 // 0 }}", "by zero"),
        ("{{ nothing.at.all }}", "undefined"),
        ("{{ unclosed", "unexpected end"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ raise_exception('System role not supported') }}", "System role not supported"),
    ],
)
def test_what_a_template_may_not_do_is_told(
    tokenizer: Tokenizer, template: str, sentence: str
) -> None:
    tokenizer.use_template(template)
    with pytest.raises(RequestError, match=sentence) as caught:
        tokenizer.render_chat(USER)
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_a_template_has_limited_time(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizers, "TEMPLATE_SECONDS", 0.2)
    tokenizer.use_template(
        "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"
    )
    start = time.monotonic()
    with pytest.raises(RequestError, match=r"longer than 0\.2 s"):
        tokenizer.render_chat(USER)
    assert time.monotonic() - start < allowed(2)
    tokenizer.use_template("{{ messages[0].content }}")
    assert tokenizer.render_chat(USER) == "hi"


def test_developers_are_systems_to_templates_that_do_not_know_them(tokenizer: Tokenizer) -> None:
    messages = [{"role": "developer", "content": "be brief"}]
    tokenizer.use_template("{{ messages[0].role }}")
    assert tokenizer.render_chat(messages) == "system"
    tokenizer.use_template("{% if messages[0].role == 'developer' %}known{% endif %}")
    assert tokenizer.render_chat(messages) == "known"
    assert messages[0]["role"] == "developer"


def test_tools_need_a_template_that_knows_them(tokenizer: Tokenizer) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    with pytest.raises(RequestError, match="knows no tools") as caught:
        tokenizer.render_chat(USER, tools=tools)
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "tools")
    tokenizer.use_template("{% for tool in tools %}{{ tool | tojson }}{% endfor %}")
    assert json.loads(tokenizer.render_chat(USER, tools=tools)) == tools[0]


def test_variables_and_continuation(tokenizer: Tokenizer) -> None:
    tokenizer.use_template("{% if enable_thinking %}think{% endif %}{{ messages[-1].content }}|")
    assert tokenizer.render_chat(USER, enable_thinking=True) == "thinkhi|"
    messages = [*USER, {"role": "assistant", "content": "I am"}]
    text = tokenizer.render_chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "I am"


def test_special_tokens_are_the_templates_own(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_chat(USER)
    assert tokenizer.decode(ids, skip_special_tokens=False).startswith("<|im_start|>user")
    assert tokenizer.is_special("<|im_start|>")
    assert not tokenizer.is_special("<tool_call>")


def test_info_names_what_remote_users_need(tokenizer: Tokenizer) -> None:
    info = tokenizer.info()
    assert info["eos_token_id"] == tokenizer.inner.eos_token_id
    assert info["vocab_size"] == 4096
    assert set(info["eos_token_ids"]) == set(tokenizer.eos_token_ids)
    assert "<|im_end|>" in info["additional_special_tokens"]
    assert json.loads(json.dumps(info)) == info


def test_no_token_is_longer_than_the_longest(tokenizer: Tokenizer) -> None:
    texts = (tokenizer.decode([token], skip_special_tokens=False) for token in range(4096))
    assert max(map(len, texts)) <= tokenizer.longest_token
