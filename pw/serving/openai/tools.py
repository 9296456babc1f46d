"""Which parser finds the tool calls of a request's answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pw.errors import RequestError
from pw.serving.openai.chat_schemas import ToolUse
from pw.serving.openai.tool_parsers import CallList, MarkedCalls, NamedCall, ToolParser
from pw.serving.openai.tool_syntaxes import SYNTAXES, Syntax
from pw.serving.process.engine_protocol import TokenizerProtocol

MakeParser = Callable[[], ToolParser]


@dataclass(frozen=True)
class ToolSettings:
    """How the served model spells calls, and whether it may decide to call."""

    syntax: Syntax | None = None
    auto: bool = True
    marks_are_special: bool = False  # tokens that are left out of answers unless asked for
    rendered: bool = True  # the chat template has a place for tools

    @classmethod
    def of_model(
        cls, tokenizer: TokenizerProtocol, name: str = "auto", *, auto: bool = True
    ) -> ToolSettings:
        """Settings for a model.

        Args:
            tokenizer: Its chat template tells the syntax that `auto` means.
            name: Of a syntax, or `auto`.
            auto: Whether tool_choice `auto` is allowed.
        """
        template = tokenizer.chat_template
        syntax = (
            next((each for each in SYNTAXES.values() if each.begin in template), None)
            if name == "auto"
            else SYNTAXES[name]
        )
        special = syntax is not None and tokenizer.is_special(syntax.begin)
        return cls(syntax, auto, special, "tools" in template)

    def parser(self, request: ToolUse) -> MakeParser | None:
        """What makes the parser of one answer; None where no call can come.

        A template that knows no tools refuses the conversation in the tokenizer's words, whatever
        the choice: here that is no call.

        Raises:
            RequestError: The model may decide, but how it spells calls is not known.
        """
        if not request.offered or not self.rendered:
            return None
        if (name := request.named) is not None:
            return lambda: NamedCall(name)
        if request.forced:
            return CallList
        syntax, schemas = self.syntax, request.schemas()
        if syntax is None or not self.auto:
            raise RequestError(
                "tool_choice auto is not available here",
                code="unsupported_parameter",
                param="tool_choice",
                hint="serve with --tool-call-parser and --enable-auto-tool-choice, "
                "or set tool_choice to `required` or `none`",
            )
        return lambda: MarkedCalls(syntax, schemas)

    def keeps_special_tokens(self, request: ToolUse) -> bool:
        """Whether marks of calls would be lost if special tokens were left out of the text."""
        return bool(request.offered) and not request.forced and self.marks_are_special
