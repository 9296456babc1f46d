"""Options of the API: what settings they become, and what is refused before a model loads."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from pw.cli.openai_options import OpenAI
from pw.errors import ConfigError, ModelError
from pw.serving.context import ServingConfig
from pw.serving.limits import ServingLimits
from pw.serving.openai.defaults import SamplingDefaults
from support.cli import run


def config(path: Path, *, api_keys: tuple[str, ...] = (), **options: object) -> ServingConfig:
    api = OpenAI(**options)  # type: ignore[arg-type]
    api.check(path)
    return api.config(path, ServingLimits(max_messages=7), model_names=("m",), api_keys=api_keys)


def test_defaults(tmp_path: Path) -> None:
    made = config(tmp_path)
    assert made == ServingConfig(
        ("m",), limits=ServingLimits(max_messages=7), grammar_tokenizer=tmp_path
    )


def test_every_option_arrives(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\n\n  two \n")
    made = config(
        tmp_path,
        api_keys=("zero",),
        api_key_file=keys,
        admin_key=["root"],
        max_n=3,
        max_logprobs=5,
        sse_ping_interval=2.5,
        default_chat_template_kwargs='{"enable_thinking": false}',
        enable_auto_tool_choice=False,
        tool_call_parser="mistral",
        return_tokens_as_token_ids=True,
        strict=True,
        enable_log_requests=True,
        max_log_len=10,
    )
    assert (made.api_keys, made.admin_keys) == (("zero", "one", "two"), ("root",))
    limits = made.limits
    assert (limits.max_n, limits.max_logprobs, limits.sse_ping_interval) == (3, 5, 2.5)
    assert limits.max_messages == 7
    assert made.template_kwargs == {"enable_thinking": False}
    assert (made.auto_tool_choice, made.tool_call_parser) == (False, "mistral")
    assert (made.tokens_by_id, made.strict, made.log_prompts, made.max_log_len) == (
        True, True, True, 10,
    )  # fmt: skip


def test_generation_config(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5}')
    other = tmp_path / "other"
    other.mkdir()
    assert config(tmp_path).defaults == SamplingDefaults(temperature=0.5)
    assert config(tmp_path, generation_config="pw").defaults == SamplingDefaults()
    assert config(tmp_path, generation_config=str(other)).defaults == SamplingDefaults()
    (other / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match="generation_config"):
        config(tmp_path, generation_config=str(other))


def test_template_of_a_file_or_a_text(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages }}")
    assert OpenAI().template() is None
    assert OpenAI(chat_template=str(file)).template() == "{{ messages }}"
    assert OpenAI(chat_template="{% if a %}{% endif %}").template() == "{% if a %}{% endif %}"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"chat_template": "nowhere.jinja"}, "--chat-template is no template"),
        ({"chat_template": "{{ open"}, "--chat-template is no template"),
        ({"default_chat_template_kwargs": "[1]"}, "must be a JSON object"),
        ({"default_chat_template_kwargs": "{"}, "must be a JSON object"),
        ({"generation_config": "nowhere"}, "--generation-config must be"),
        ({"api_key_file": Path("nowhere")}, "--api-key-file cannot be read"),
        ({"admin_key": [""]}, "key is empty"),
        ({"max_n": 0}, "max_n must be positive"),
        ({"max_logprobs": 21}, "max_logprobs must be at most 20"),
        ({"sse_ping_interval": 0.0}, "sse_ping_interval must be positive"),
        ({"tool_call_parser": "other"}, "--tool-call-parser must be"),
    ],
)
def test_refused_before_the_model_loads(
    tmp_path: Path, options: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        config(tmp_path, **options)


def test_an_empty_key_file_protects_nothing(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("\n")
    with pytest.raises(ConfigError, match="has no key"):
        config(tmp_path, api_key_file=tmp_path / "keys")


def test_the_command_has_them() -> None:
    text = run("serve", "--help").out
    assert "OpenAI API" in text
    for field in fields(OpenAI):
        assert f"--{field.name.replace('_', '-')}"[:18] in text  # long names are cut
