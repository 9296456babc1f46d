"""Request bodies as OpenAI and vLLM clients send them, and what they mean to the sampler.

Fields we do not know are ignored, as clients add new ones all the time. Fields we know and cannot
honour are refused, unless they hold the value that changes nothing. Null is as good as absent.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, Strict, StrictBool, model_validator

from pw.engine.request import SamplingParams
from pw.errors import RequestError
from pw.serving.limits import ServingLimits
from pw.serving.openai.defaults import SamplingDefaults
from pw.serving.structured.output_formats import OutputFormats

# Neither true nor "5" nor 5.0, and nothing that a 64-bit engine cannot hold.
Integer = Annotated[int, Strict(), Field(ge=-(2**63), lt=2**63)]
Number = Annotated[float, Strict()]
Prompts = str | list[str] | list[Integer] | list[list[Integer]]

# Known fields that nothing here honours -> the values with which they ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),  # templates are the operator's
    "function_call": ("none", "auto"),
    "functions": ([],),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),  # of a completion; a chat has these two
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
# Known fields without a meaning for one server on one machine.
_SILENT = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prediction", "priority", "request_id", "detokenize", "include_reasoning",
    "truncation", "verbosity",
}  # fmt: skip


class Body(BaseModel):
    """A request body: what is null is left out."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        if isinstance(body, dict):
            return {name: value for name, value in body.items() if value is not None}
        return body


class StreamOptions(Body):
    """What a stream carries beside text."""

    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False


class Precision(BaseModel):
    """The least precision that the answer accepts."""

    model_config = ConfigDict(extra="forbid")

    min_bits: Annotated[Integer, Field(ge=1, le=16)]


class GenerationRequest(OutputFormats, Body):
    """The fields that both endpoints share."""

    model: str | None = None
    n: Annotated[Integer, Field(ge=1)] = 1
    stream: StrictBool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: Integer | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Integer | None = None
    min_p: Number | None = None
    seed: Integer | None = None
    stop: str | list[str] = Field(default_factory=list)
    stop_token_ids: Annotated[list[Integer], Field(max_length=128)] = Field(default_factory=list)
    include_stop_str_in_output: StrictBool = False
    ignore_eos: StrictBool = False
    min_tokens: Integer = 0
    skip_special_tokens: StrictBool = True
    spaces_between_special_tokens: StrictBool = (
        True  # only slow tokenizers, which we do not run, know it
    )
    frequency_penalty: Number = 0.0
    presence_penalty: Number = 0.0
    repetition_penalty: Number | None = None
    logit_bias: dict[str, Number] = Field(default_factory=dict)
    prompt_logprobs: Integer | None = None
    return_tokens_as_token_ids: StrictBool | None = None
    precision: Precision | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream carries usage."""
        return self.include_usage and self.stream_options.continuous_usage_stats

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
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if (chars := sum(map(len, stop))) > limits.max_stop_chars:
            raise RequestError(
                f"stop must be at most {limits.max_stop_chars} characters: {chars}", param="stop"
            )
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError(
                "prompt_logprobs does not go with stream", param="prompt_logprobs",
                code="unsupported_parameter", hint="use echo and logprobs of /v1/completions",
            )  # fmt: skip
        limits.check_logprobs(self.prompt_logprobs, "prompt_logprobs")
        given = {
            name: getattr(self, name)
            for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
            if getattr(self, name) is not None
        }
        return SamplingParams(
            **(vars(defaults) | given),
            max_tokens=self.max_tokens,
            seed=self.seed,
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            logit_bias=tuple(_biases(self.logit_bias)),
            prompt_logprobs=self.prompt_logprobs,
            min_bits=None if self.precision is None else self.precision.min_bits,
            grammar=self.grammar(),
        )


class CompletionRequest(GenerationRequest):
    """Body of `POST /v1/completions`."""

    prompt: Prompts
    echo: StrictBool = False
    logprobs: Integer | None = None
    best_of: Integer | None = None
    add_special_tokens: StrictBool = True

    def sampling(self, defaults: SamplingDefaults, limits: ServingLimits) -> SamplingParams:
        """Sampling parameters of choice 0; see the base class."""
        if self.best_of is not None and self.best_of != self.n:
            raise RequestError(
                f"best_of must equal n ({self.n}): {self.best_of}",
                code="unsupported_parameter",
                param="best_of",
            )
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise RequestError("max_tokens must be at least 1 without echo: 0", param="max_tokens")
        limits.check_logprobs(self.logprobs, "logprobs")
        params = replace(super().sampling(defaults, limits), logprobs=self.logprobs)
        if self.echo and self.logprobs is not None:
            wanted = max(self.logprobs, self.prompt_logprobs or 0)
            params = replace(params, prompt_logprobs=wanted)
        return check_least(params)


class DetokenizeRequest(Body):
    """Body of `POST /detokenize`."""

    model: str | None = None
    tokens: list[Integer]


def check_least(params: SamplingParams) -> SamplingParams:
    """The same parameters, if as many tokens may come as must.

    Raises:
        RequestError: They may not.
    """
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise RequestError(
            f"min_tokens must be at most max_tokens ({params.max_tokens}): {params.min_tokens}",
            param="min_tokens",
        )
    return params


def _biases(given: dict[str, float]) -> list[tuple[int, float]]:
    """`logit_bias` by number; its keys are ids as text.

    Raises:
        RequestError: A key is no id.
    """
    for key in given:
        if not (key.isascii() and key.isdigit() and len(key) < 19):
            raise RequestError(
                f"logit_bias must have token ids as keys: `{key[:32]}`", param="logit_bias"
            )
    return [(int(key), bias) for key, bias in given.items()]
