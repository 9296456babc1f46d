"""What an answer must look like: `response_format`, `structured_outputs` and `guided_*`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, StrictBool

from pw.engine.request import Grammar
from pw.errors import RequestError
from pw.serving.structured.json_schema import normalized
from pw.serving.structured.regexes import check_regex

MAX_CHOICES = 1024
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]


class NamedSchema(BaseModel):
    """The schema of a `json_schema` format. Every schema is followed to the letter."""

    model_config = ConfigDict(populate_by_name=True)

    name: str = ""
    description: str | None = None
    strict: StrictBool | None = None
    schema_: dict[str, Any] | StrictBool = Field(alias="schema")


class ResponseFormat(BaseModel):
    """OpenAI's way to ask for JSON."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(BaseModel):
    """VLLM's way to ask for JSON and more."""

    model_config = ConfigDict(extra="forbid")

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_object: StrictBool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None


class OutputFormats(BaseModel):
    """The fields of a request that bind its output; at most one may be set."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None

    def grammar(self) -> Grammar | None:
        """What the output must match, if the request says so.

        Raises:
            RequestError: Two formats at once, or one that cannot be followed.
        """
        wanted = self._wanted()
        if len(wanted) > 1:
            raise RequestError(
                "at most one of response_format, structured_outputs, guided_json, guided_regex, "
                "guided_choice and guided_grammar may bind the output",
                param=wanted[1][0],
            )
        return _grammar(*wanted[0]) if wanted else None

    @property
    def grammar_param(self) -> str:
        """The field that `grammar` comes from."""
        wanted = self._wanted()
        return wanted[0][0] if wanted else "tools"

    def _wanted(self) -> list[tuple[str, str, Any]]:
        """Field, kind of grammar and value of each format that is set."""
        return [*self._response(), *self._structured(), *self._guided()]

    def _response(self) -> list[tuple[str, str, Any]]:
        asked = self.response_format
        if asked is None or asked.type == "text":
            return []
        if asked.type == "json_object":
            return [("response_format", "json_object", None)]
        if asked.json_schema is None:
            raise RequestError(
                "response_format of type json_schema needs json_schema", param="response_format"
            )
        return [("response_format", "json_schema", asked.json_schema.schema_)]

    def _structured(self) -> list[tuple[str, str, Any]]:
        asked = self.structured_outputs
        if asked is None:
            return []
        fields = (
            ("json_schema", asked.json_),
            ("json_object", asked.json_object or None),
            ("regex", asked.regex),
            ("choice", asked.choice),
            ("ebnf", asked.grammar),
        )
        return [("structured_outputs", kind, value) for kind, value in fields if value is not None]

    def _guided(self) -> list[tuple[str, str, Any]]:
        fields = (
            ("guided_json", "json_schema", self.guided_json),
            ("guided_regex", "regex", self.guided_regex),
            ("guided_choice", "choice", self.guided_choice),
            ("guided_grammar", "ebnf", self.guided_grammar),
        )
        return [each for each in fields if each[2] is not None]


def _grammar(param: str, kind: Any, value: Any) -> Grammar:
    """The engine's form of one format."""
    if kind == "json_object":
        return Grammar("json_object")
    if kind == "choice":
        if len(value) > MAX_CHOICES:
            raise RequestError(
                f"{param} must have at most {MAX_CHOICES} choices: {len(value)}", param=param
            )
        value = orjson.dumps(value).decode()
    if kind == "json_schema":
        value = schema_text(value, param)
    try:
        if kind == "regex":
            check_regex(value)
        return Grammar(kind, value)
    except ValueError as error:
        raise RequestError(f"{param} cannot be followed: {error}", param=param) from None
    except RequestError as error:
        raise RequestError(error.message, param=param) from None


def schema_text(schema: Any, param: str) -> str:
    """A schema as the engine takes it.

    Args:
        schema: The schema, or its JSON text.
        param: The request field that it stands in.

    Raises:
        RequestError: It is no schema, or says something that no grammar can follow.
    """
    try:
        parsed = orjson.loads(schema) if isinstance(schema, str) else schema
        return orjson.dumps(normalized(parsed)).decode()
    except ValueError as error:  # orjson's errors are among them
        raise RequestError(f"{param} has no usable JSON schema: {error}", param=param) from None
