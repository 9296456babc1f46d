"""Options of `pw serve` that shape what clients may ask and what answers look like."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pw.cli.options import option
from pw.errors import ConfigError

if TYPE_CHECKING:
    from pw.serving.context import ServingConfig
    from pw.serving.limits import ServingLimits
    from pw.serving.openai.defaults import SamplingDefaults

_api = partial(option, "OpenAI API")


@dataclass(frozen=True)
class OpenAI:
    """What the API offers; names as vLLM has them where it has them."""

    api_key_file: Annotated[Path | None, _api("File with more API keys, one a line.")] = None
    admin_key: Annotated[
        list[str] | None, _api("Key that may change the policy, too; repeatable (default: none).")
    ] = None
    max_n: Annotated[int, _api("Choices of one prompt at most.")] = 16
    max_logprobs: Annotated[int, _api("Alternatives of a token at most, up to 20.")] = 20
    chat_template: Annotated[
        str | None, _api("A file or the text of a Jinja template (default: the model's).")
    ] = None
    default_chat_template_kwargs: Annotated[
        str | None, _api("Variables of every chat template.", metavar="JSON")
    ] = None
    generation_config: Annotated[
        str, _api("Sampling defaults: auto (the model's), pw (none) or a folder.")
    ] = "auto"
    enable_auto_tool_choice: Annotated[
        bool,
        _api(
            "Whether a model may decide to call tools.",
            "--enable-auto-tool-choice/--no-enable-auto-tool-choice",
        ),
    ] = True
    tool_call_parser: Annotated[
        str,
        _api(
            "How the model spells calls: hermes, qwen3_coder, mistral, gemma4, functiongemma, "
            "or auto, by its template."
        ),
    ] = "auto"
    return_tokens_as_token_ids: Annotated[
        bool, _api("Spell tokens in logprobs as `token_id:123`.", "--return-tokens-as-token-ids")
    ] = False
    strict: Annotated[bool, _api("Refuse requests with unknown fields.", "--strict")] = False
    sse_ping_interval: Annotated[
        float, _api("Seconds of silence after which a stream gets a comment.")
    ] = 15.0
    enable_log_requests: Annotated[
        bool, _api("Log prompts and parameters.", "--enable-log-requests")
    ] = False
    max_log_len: Annotated[
        int | None, _api("Characters of a logged prompt at most (default: all).")
    ] = None

    def config(self, path: Path, limits: ServingLimits, **fields: Any) -> ServingConfig:
        """The app's settings.

        Args:
            path: The artifact.
            limits: Their fields that have an option here are replaced.
            fields: Of `ServingConfig`, for the rest.

        Raises:
            ConfigError: A value is out of range, or a file cannot be read.
        """
        from dataclasses import replace

        from pw.serving.context import ServingConfig

        return ServingConfig(
            **(fields | {"api_keys": (*fields.get("api_keys", ()), *self._keys_of_file())}),
            admin_keys=tuple(self.admin_key or ()),
            limits=replace(
                limits,
                max_n=self.max_n,
                max_logprobs=self.max_logprobs,
                sse_ping_interval=self.sse_ping_interval,
            ),
            defaults=self._defaults(path),
            template_kwargs=self._template_kwargs(),
            auto_tool_choice=self.enable_auto_tool_choice,
            tool_call_parser=self.tool_call_parser,
            tokens_by_id=self.return_tokens_as_token_ids,
            strict=self.strict,
            grammar_tokenizer=path,
            log_prompts=self.enable_log_requests,
            max_log_len=self.max_log_len,
        )

    def check(self, path: Path) -> None:
        """Refuse what cannot be honoured, before the model is loaded.

        Raises:
            ConfigError: A value is out of range, or a file cannot be read.
        """
        from pw.serving.limits import ServingLimits

        self.template()
        self.config(path, ServingLimits(), model_names=("checked",))

    def template(self) -> str | None:
        """The chat template of the command line, if there is one.

        Raises:
            ConfigError: It is neither a file nor a template.
        """
        if self.chat_template is None:
            return None
        import jinja2

        source = self.chat_template
        try:
            if "{" not in source:
                source = Path(source).read_text(encoding="utf-8")
            jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(source)
        except (OSError, ValueError, jinja2.TemplateSyntaxError) as error:
            raise ConfigError(
                f"--chat-template is no template: {error}", "give a file or a Jinja template"
            ) from error
        return source

    def _keys_of_file(self) -> list[str]:
        if self.api_key_file is None:
            return []
        try:
            lines = self.api_key_file.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise ConfigError(f"--api-key-file cannot be read: {error}") from error
        keys = [line.strip() for line in lines if line.strip()]
        if not keys:
            raise ConfigError(f"--api-key-file has no key: `{self.api_key_file}`")
        return keys

    def _defaults(self, path: Path) -> SamplingDefaults:
        from pw.serving.openai.defaults import SamplingDefaults

        if self.generation_config == "pw":
            return SamplingDefaults()
        folder = path if self.generation_config == "auto" else Path(self.generation_config)
        if not folder.is_dir():
            raise ConfigError(
                "--generation-config must be auto, pw or a folder with a generation_config.json: "
                f"`{self.generation_config}`"
            )
        return SamplingDefaults.of_model(folder)

    def _template_kwargs(self) -> dict[str, Any]:
        text = self.default_chat_template_kwargs or "{}"
        try:
            given = json.loads(text)
        except ValueError:
            given = None
        if not isinstance(given, dict):
            raise ConfigError(f"--default-chat-template-kwargs must be a JSON object: `{text}`")
        return given
