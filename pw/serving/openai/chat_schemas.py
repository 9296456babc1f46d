"""Conversations and tools as clients send them, and as chat templates and parsers need them."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

import orjson
from pydantic import AliasChoices, BaseModel, Field, StrictBool, model_validator
from pydantic_core import PydanticCustomError

from pw.engine.request import Grammar, SamplingParams
from pw.errors import RequestError
from pw.serving.limits import ServingLimits
from pw.serving.openai.defaults import SamplingDefaults
from pw.serving.openai.schemas import Body, GenerationRequest, Integer, check_least
from pw.serving.structured.output_formats import schema_text

TEMPLATE_KWARGS = ("enable_thinking", "thinking", "preserve_thinking", "reasoning_effort")
_OTHER_PARTS = {
    **dict.fromkeys(("image", "image_url", "input_image"), "image"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "audio"),
    **dict.fromkeys(("video", "video_url"), "video"),
    **dict.fromkeys(("file", "input_file"), "file"),
}
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}

FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]


class ContentPart(BaseModel):
    """One part of a message; text only. What an assistant refused with is text, too."""

    type: Literal["text", "refusal"]
    text: str = Field(validation_alias=AliasChoices("text", "refusal"))

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, part: Any) -> Any:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in _OTHER_PARTS:
            raise PydanticCustomError(
                "other_part", "{kind} parts are not supported", {"kind": _OTHER_PARTS[kind]}
            )
        return part


class CalledFunction(BaseModel):
    """Name and arguments of an earlier call."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class EarlierCall(BaseModel):
    """A tool call that the assistant made before."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """The call with its arguments as an object, which is what templates spell out.

        Arguments that an answer's end has cut short come back from clients as they are: the
        template gets their text.
        """
        arguments: Any = self.function.arguments
        if isinstance(arguments, str):
            try:
                arguments = orjson.loads(arguments or "{}")
            except ValueError:
                return self._spelled(arguments)
        if not isinstance(arguments, dict):
            raise RequestError(
                f"arguments of the call to `{self.function.name[:64]}` must be a JSON object",
                param="messages",
            )
        return self._spelled(arguments)

    def _spelled(self, arguments: Any) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] = ""
    name: str | None = None
    tool_calls: list[EarlierCall] = Field(default_factory=list)
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it: content is one string."""
        parts = self.content
        text = parts if isinstance(parts, str) else "\n".join(part.text for part in parts)
        turn: dict[str, Any] = {"role": self.role, "content": text}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                turn[name] = value
        if self.tool_calls:
            turn["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return turn


class Function(BaseModel):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class Tool(BaseModel):
    """One entry of `tools`."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """The tool as templates spell it out."""
        function = self.function.model_dump(exclude_none=True, exclude={"strict"})
        return {"type": "function", "function": {"parameters": _NO_PARAMETERS} | function}


class ChosenFunction(BaseModel):
    """The name in a `tool_choice`."""

    name: str


class NamedTool(BaseModel):
    """A `tool_choice` that names the function."""

    type: Literal["function"]
    function: ChosenFunction


class ToolUse(Body):
    """The fields of a chat request that speak of tools."""

    tools: list[Tool] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: StrictBool = True

    @property
    def forced(self) -> bool:
        """Whether the whole answer must be calls."""
        return bool(self.tools) and self.tool_choice not in ("none", "auto")

    @property
    def offered(self) -> list[Tool]:
        """The tools that the model is told of."""
        return [] if self.tool_choice == "none" else self.tools

    @property
    def named(self) -> str | None:
        """The function that must be called."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None

    def schemas(self) -> dict[str, dict[str, Any]]:
        """JSON schema of each offered function's parameters.

        Raises:
            RequestError: Two functions share a name, or `tool_choice` asks for one that is none.
        """
        found = {tool.function.name: tool.function.parameters or {} for tool in self.offered}
        if len(found) < len(self.offered):
            raise RequestError("two tools have the same name", param="tools")
        if not self.tools and (self.tool_choice == "required" or self.named is not None):
            raise RequestError("tool_choice needs tools", param="tool_choice")
        if self.named is not None and self.named not in found:
            raise RequestError(
                f"tool_choice names no tool of the request: `{self.named[:64]}`",
                param="tool_choice",
            )
        return found

    def call_grammar(self) -> Grammar | None:
        """What binds the answer when it must be calls: the arguments, or a list of calls.

        Raises:
            RequestError: A function's parameters are no usable schema.
        """
        if not self.forced:
            return None
        schemas = {name: schema or _NO_PARAMETERS for name, schema in self.schemas().items()}
        if self.named is not None:
            return Grammar("json_schema", schema_text(schemas[self.named], "tools"))
        shared: dict[str, Any] = {}
        calls = [_call_schema(name, schema, shared) for name, schema in schemas.items()]
        array: dict[str, Any] = {"type": "array", "items": {"anyOf": calls}, "minItems": 1}
        if not self.parallel_tool_calls:
            array["maxItems"] = 1
        return Grammar("json_schema", schema_text(array | shared, "tools"))


class ChatRequest(GenerationRequest, ToolUse):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Integer | None = None
    logprobs: StrictBool = False
    top_logprobs: Integer | None = None
    add_generation_prompt: StrictBool = True
    continue_final_message: StrictBool = False
    add_special_tokens: StrictBool = False
    chat_template_kwargs: dict[str, str | bool | int | float | None] = Field(default_factory=dict)
    reasoning_effort: str | None = None

    def sampling(self, defaults: SamplingDefaults, limits: ServingLimits) -> SamplingParams:
        """Sampling parameters of choice 0; see the base class."""
        if self.top_logprobs and not self.logprobs:  # 0 asks for nothing
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        limits.check_logprobs(self.top_logprobs, "top_logprobs")
        limits.check_tools(len(self.tools))
        params = super().sampling(defaults, limits)
        if self.max_completion_tokens is not None:
            params = replace(params, max_tokens=self.max_completion_tokens)
        if params.max_tokens == 0:
            raise RequestError("max_tokens must be at least 1: 0", param="max_tokens")
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return check_least(replace(params, logprobs=logprobs))

    def grammar(self) -> Grammar | None:
        """What the output must match: its format, or the calls that it must be.

        Raises:
            RequestError: It should be both, or either is not usable.
        """
        asked = super().grammar()
        self.schemas()
        if asked is not None and self.offered:
            raise RequestError(
                "an output format does not go with tools", param="tool_choice",
                code="unsupported_parameter", hint="set tool_choice to `none`",
            )  # fmt: skip
        return asked or self.call_grammar()

    def template_options(self) -> dict[str, Any]:
        """Options for the chat template.

        Raises:
            RequestError: A keyword that requests may not set.
        """
        options: dict[str, Any] = dict(self.chat_template_kwargs)
        for name in options:
            if name not in TEMPLATE_KWARGS:
                raise RequestError(
                    f"chat_template_kwargs may only have {', '.join(TEMPLATE_KWARGS)}: "
                    f"`{name[:64]}`",
                    param="chat_template_kwargs",
                )
        if self.reasoning_effort is not None:
            options["reasoning_effort"] = self.reasoning_effort
        if self.offered:
            options["tools"] = [tool.for_template() for tool in self.offered]
        return options | {
            "add_generation_prompt": self.add_generation_prompt and not self.continue_final_message,
            "continue_final_message": self.continue_final_message,
            "add_special_tokens": self.add_special_tokens,
        }


class TokenizeRequest(Body):
    """Body of `POST /tokenize`: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: list[Tool] = Field(default_factory=list)
    add_special_tokens: StrictBool | None = None
    add_generation_prompt: StrictBool = True
    continue_final_message: StrictBool = False
    return_token_strs: StrictBool = False

    def template_options(self) -> dict[str, Any]:
        """Options for the chat template."""
        options: dict[str, Any] = {
            "add_generation_prompt": self.add_generation_prompt and not self.continue_final_message,
            "continue_final_message": self.continue_final_message,
            "add_special_tokens": bool(self.add_special_tokens),
        }
        return options | (
            {"tools": [tool.for_template() for tool in self.tools]} if self.tools else {}
        )


def _call_schema(name: str, schema: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    """The schema of one call; definitions that its references name move to the root.

    Args:
        name: The function's.
        schema: Its parameters.
        shared: Definitions of all functions so far; changed in place.
    """
    inner = dict(schema)
    for place in ("$defs", "definitions"):
        for key, definition in (inner.pop(place, None) or {}).items():
            known = shared.setdefault(place, {}).setdefault(key, definition)
            if known != definition:
                raise RequestError(f"two tools define `{key[:64]}` differently", param="tools")
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": inner},
        "required": ["name", "parameters"],
    }
