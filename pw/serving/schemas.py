"""Request bodies as OpenAI and vLLM clients send them, and what they mean to the sampler.

Fields we do not know are ignored, as clients add new ones all the time. Fields we know and cannot
honour are refused, unless they hold the value that changes nothing.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Strict

from pw.engine.request import SamplingParams
from pw.errors import ModelError, RequestError
from pw.serving.limits import ServingLimits

logger = logging.getLogger("pw.serving")

Integer = Annotated[int, Strict()]  # neither true nor "5" nor 5.0
Number = Annotated[float, Strict()]
Prompts = str | list[str] | list[Integer] | list[list[Integer]]

# Known fields that nothing here honours -> the values with which they ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "frequency_penalty": (None, 0),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "logit_bias": (None, {}),
    "modalities": (None, ["text"]),
    "presence_penalty": (None, 0),
    "prompt_logprobs": (None,),
    "repetition_penalty": (None, 1),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
}
TEMPLATE_KWARGS = ("enable_thinking", "thinking", "reasoning_effort")
# Known fields without a meaning for one server on one machine.
_SILENT = {
    "user", "metadata", "store", "parallel_tool_calls", "service_tier", "safety_identifier",
    "prompt_cache_key", "spaces_between_special_tokens",
}  # fmt: skip


@dataclass(frozen=True)
class SamplingDefaults:
    """Values for fields that a request leaves out; from the model's generation config."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0

    @classmethod
    def of_model(cls, path: Path) -> SamplingDefaults:
        """What `generation_config.json` in a checkpoint or artifact folder states, if anything.

        Raises:
            ModelError: The file is damaged or states a value out of range.
        """
        file = path / "generation_config.json"
        try:
            stated = json.loads(file.read_bytes()) if file.is_file() else {}
            names = [each.name for each in fields(cls)]
            values: dict[str, Any] = {
                name: stated[name] for name in names if stated.get(name) is not None
            }
            SamplingParams(**values)  # checks the ranges
        except (ValueError, TypeError, AttributeError, RequestError) as error:
            raise ModelError(f"not a usable generation config: `{file}` ({error})") from error
        if values:
            logger.info("sampling defaults of the model: %s", values)
        return cls(**values)


class StreamOptions(BaseModel):
    """What a stream carries beside text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationRequest(BaseModel):
    """The fields that both endpoints share."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    model: str | None = None
    n: Annotated[Integer, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Integer | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Integer | None = None
    min_p: Number | None = None
    seed: Integer | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[Integer], Field(max_length=128)] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: Integer = 0
    skip_special_tokens: bool = True

    @property
    def choices(self) -> int:
        """Completions asked for each prompt."""
        return 1 if self.n is None else self.n

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream carries usage."""
        return self.include_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )

    def unknown_fields(self) -> list[str]:
        """Names of the fields that are ignored because we do not know them.

        Raises:
            RequestError: A field that we know and do not honour asks for something.
        """
        unknown = []
        for name, value in (self.model_extra or {}).items():
            if name in UNSUPPORTED:
                if value not in UNSUPPORTED[name]:
                    raise RequestError(
                        f"{name} is not supported", code="unsupported_parameter", param=name
                    )
            elif name not in _SILENT:
                unknown.append(name)
        return unknown

    def sampling(self, defaults: SamplingDefaults, limits: ServingLimits) -> SamplingParams:
        """Sampling parameters of choice 0.

        Raises:
            RequestError: A value is out of range.
        """
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if (chars := sum(map(len, stop))) > limits.max_stop_chars:
            raise RequestError(
                f"stop must be at most {limits.max_stop_chars} characters: {chars}", param="stop"
            )
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=defaults.temperature if self.temperature is None else self.temperature,
            top_p=defaults.top_p if self.top_p is None else self.top_p,
            top_k=defaults.top_k if self.top_k is None else self.top_k,
            min_p=defaults.min_p if self.min_p is None else self.min_p,
            seed=self.seed,
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
        )


class CompletionRequest(GenerationRequest):
    """Body of `POST /v1/completions`."""

    prompt: Prompts
    echo: bool = False
    logprobs: Integer | None = None
    best_of: Integer | None = None
    add_special_tokens: bool = True

    def sampling(self, defaults: SamplingDefaults, limits: ServingLimits) -> SamplingParams:
        """Sampling parameters of choice 0; see the base class."""
        if self.best_of is not None and self.best_of != self.choices:
            raise RequestError(
                f"best_of must equal n ({self.choices}): {self.best_of}",
                code="unsupported_parameter",
                param="best_of",
            )
        if self.max_tokens == 0 and not self.echo:
            raise RequestError("max_tokens must be at least 1 without echo: 0", param="max_tokens")
        return replace(
            super().sampling(defaults, limits),
            logprobs=self.logprobs,
            prompt_logprobs=self.logprobs if self.echo else None,
        )


class ContentPart(BaseModel):
    """One part of a message; text only."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One turn of a conversation."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it: content is one string."""
        turn: dict[str, Any] = self.model_dump(exclude_none=True, exclude={"content"})
        parts = self.content if isinstance(self.content, list) else []
        text = self.content if isinstance(self.content, str) else ""
        return turn | {"content": "\n".join(part.text for part in parts) or text}


class ChatRequest(GenerationRequest):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Integer | None = None
    logprobs: bool | None = None
    top_logprobs: Integer | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, str | bool | int | float | None] | None = None

    def sampling(self, defaults: SamplingDefaults, limits: ServingLimits) -> SamplingParams:
        """Sampling parameters of choice 0; see the base class."""
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        params = super().sampling(defaults, limits)
        if self.max_completion_tokens is not None:
            params = replace(params, max_tokens=self.max_completion_tokens)
        if params.max_tokens == 0:
            raise RequestError("max_tokens must be at least 1: 0", param="max_tokens")
        return replace(params, logprobs=(self.top_logprobs or 0) if self.logprobs else None)

    def template_options(self) -> dict[str, Any]:
        """Options for the chat template.

        Raises:
            RequestError: A keyword that requests may not set.
        """
        options = self.chat_template_kwargs or {}
        for name in options:
            if name not in TEMPLATE_KWARGS:
                raise RequestError(
                    f"chat_template_kwargs may only have {', '.join(TEMPLATE_KWARGS)}: "
                    f"`{name[:64]}`",
                    param="chat_template_kwargs",
                )
        return {
            **options,
            "add_generation_prompt": self.add_generation_prompt and not self.continue_final_message,
            "continue_final_message": self.continue_final_message,
        }


class TokenizeRequest(BaseModel):
    """Body of `POST /tokenize`: a text or a conversation."""

    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class DetokenizeRequest(BaseModel):
    """Body of `POST /detokenize`."""

    tokens: list[Integer]
