"""The JSON of answers: whole ones and the chunks of a stream, for both endpoints."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pw.engine.request import FinishReason, RequestOutput, TokenLogprob
from pw.serving.openai.generation import SequenceSpec
from pw.serving.openai.logprobs import (
    CompletionLogprobs,
    TokenTexts,
    chat_logprobs,
    prompt_logprob_maps,
)
from pw.serving.openai.tool_parsers import ToolParser
from pw.serving.openai.tool_text import CallBegin, Piece

Json = dict[str, Any]


@dataclass(frozen=True)
class Head:
    """The fields that the answer and all its chunks share."""

    id: str
    created: int  # Unix seconds
    model: str
    system_fingerprint: str


@dataclass
class Choice:
    """One sequence's outputs put together."""

    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def add(self, output: RequestOutput) -> None:
        """Append an output."""
        self.text += output.text
        self.logprobs.extend(output.logprobs)
        self.prompt_logprobs.extend(output.prompt_logprobs)
        self.finish_reason = output.finish_reason


class Writer(Protocol):
    """Spells one endpoint's answer. `index` counts the sequences of the request."""

    def deltas(self, index: int, output: RequestOutput) -> list[Json]:
        """Chunk choices for a sequence's next output; none when it holds no news."""

    def answer(self, choices: list[Choice], usage: Json) -> Json:
        """The whole answer."""

    def chunk(self, choices: list[Json]) -> Json:
        """One chunk of a stream."""


class CompletionWriter:
    """`/v1/completions`.

    Args:
        head: Fields that all chunks share.
        sequences: What runs; a choice each.
        texts: Spells tokens.
        logprobs: Alternatives of each token, or None for no `logprobs`.
        prompt_logprobs: Alternatives of each prompt token, or None for no `prompt_logprobs`.
    """

    def __init__(
        self,
        head: Head,
        sequences: list[SequenceSpec],
        texts: TokenTexts,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
    ) -> None:
        self._head = head
        self._sequences = sequences
        self._texts = texts
        self._wanted = logprobs
        self._prompt_wanted = prompt_logprobs
        self._lists = [CompletionLogprobs(texts, logprobs or 0) for _ in sequences]
        self._prompt_told = [0] * len(sequences)  # prompt tokens whose entries are written
        self._opened: set[int] = set()

    def deltas(self, index: int, output: RequestOutput) -> list[Json]:
        """One chunk choice per output that has text, logprobs or the end; the first echoes."""
        text = output.text
        if index not in self._opened:
            self._opened.add(index)
            text = self._echo(index) + text
        logprobs = self._logprobs(index, output.prompt_logprobs, output.logprobs)
        if not text and logprobs is None and output.finish_reason is None:
            return []
        return [self._choice(index, text, logprobs, output.finish_reason)]

    def answer(self, choices: list[Choice], usage: Json) -> Json:
        """The whole answer."""
        written = [self._finished(index, choice) for index, choice in enumerate(choices)]
        return self.chunk(written) | {"usage": usage}

    def chunk(self, choices: list[Json]) -> Json:
        """One chunk; completions use one `object` for both."""
        return {"object": "text_completion", **vars(self._head), "choices": choices}

    def _finished(self, index: int, choice: Choice) -> Json:
        """A choice, after the prompt where `echo` asks for it."""
        logprobs = self._logprobs(index, choice.prompt_logprobs, choice.logprobs)
        text = self._echo(index) + choice.text
        written = self._choice(index, text, logprobs, choice.finish_reason)
        if self._prompt_wanted is not None:
            entries = choice.prompt_logprobs
            written["prompt_logprobs"] = prompt_logprob_maps(
                self._texts, entries, self._prompt_wanted
            )
        return written

    def _echo(self, index: int) -> str:
        return self._sequences[index].prompt.text or ""

    def _logprobs(
        self,
        index: int,
        prompt_logprobs: Sequence[TokenLogprob | None],
        logprobs: Sequence[TokenLogprob],
    ) -> Json | None:
        """The lists over the next tokens; those of the prompt only beside its text."""
        prompt = self._sequences[index].prompt
        if self._wanted is None:
            return None
        rows: list[tuple[int, TokenLogprob | None]] = []
        if prompt.text is not None:
            told = self._prompt_told[index]
            self._prompt_told[index] += len(prompt_logprobs)
            rows += zip(prompt.token_ids[told:], prompt_logprobs, strict=False)
        rows += ((entry.token_id, entry) for entry in logprobs)
        return self._lists[index].lists(rows) if rows else None

    @staticmethod
    def _choice(
        index: int, text: str, logprobs: Json | None, finish_reason: FinishReason | None
    ) -> Json:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


class ChatWriter:
    """`/v1/chat/completions`.

    Args:
        head: Fields that all chunks share.
        sequences: What runs; a choice each.
        texts: Spells tokens.
        logprobs: Whether tokens are told with theirs.
        prompt_logprobs: Alternatives of each prompt token, or None for no `prompt_logprobs`.
        parser: Makes what finds tool calls in a sequence's text; None where there are none.
        parallel_calls: Whether a choice may have more than one call; others are dropped.
    """

    def __init__(
        self,
        head: Head,
        sequences: list[SequenceSpec],
        texts: TokenTexts,
        *,
        logprobs: bool = False,
        prompt_logprobs: int | None = None,
        parser: Callable[[], ToolParser] | None = None,
        parallel_calls: bool = True,
    ) -> None:
        self._head = head
        self._texts = texts
        self._wanted = logprobs
        self._prompt_wanted = prompt_logprobs
        self._parsers = [parser() for _ in sequences] if parser else None
        self._max_calls = math.inf if parallel_calls else 1
        self._calls = [0] * len(sequences)  # calls of each sequence so far
        self._opened: set[int] = set()

    def deltas(self, index: int, output: RequestOutput) -> list[Json]:
        """Chunk choices of their own for the role, for news, and for the end."""
        deltas = []
        if index not in self._opened:
            self._opened.add(index)
            deltas.append(self._delta(index, {"role": "assistant", "content": ""}))
        finish = output.finish_reason
        bodies = [self._body(piece, index) for piece in self._pieces(index, output.text, finish)]
        logprobs = self._logprobs(output.logprobs) if output.logprobs else None
        if logprobs is not None and not bodies:
            bodies = [{"content": ""}]
        for body in bodies:
            deltas.append(self._delta(index, body, logprobs))
            logprobs = None
        if finish is not None:
            deltas.append(self._delta(index, {}, None, self._reason(index, finish)))
        return deltas

    def answer(self, choices: list[Choice], usage: Json) -> Json:
        """The whole answer."""
        head = {"object": "chat.completion", **vars(self._head)}
        written = [self._finished(index, choice) for index, choice in enumerate(choices)]
        answer = {**head, "choices": written, "usage": usage}
        if self._prompt_wanted is not None:
            entries = choices[0].prompt_logprobs
            answer["prompt_logprobs"] = prompt_logprob_maps(
                self._texts, entries, self._prompt_wanted
            )
        return answer

    def chunk(self, choices: list[Json]) -> Json:
        """One chunk."""
        return {"object": "chat.completion.chunk", **vars(self._head), "choices": choices}

    def _finished(self, index: int, choice: Choice) -> Json:
        assert choice.finish_reason is not None
        content = ""
        calls: list[Json] = []
        for piece in self._pieces(index, choice.text, choice.finish_reason):
            if isinstance(piece, str):
                content += piece
            elif isinstance(piece, CallBegin):
                calls.append(self._call(piece))
            else:
                calls[-1]["function"]["arguments"] += piece.text
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": self._reason(index, choice.finish_reason),
        }

    def _pieces(self, index: int, text: str, finish: FinishReason | None) -> Iterator[Piece]:
        """Content and parts of calls that are certain after more text."""
        if self._parsers is None:
            yield from [text] if text else []
            return
        parser = self._parsers[index]
        pieces = parser.feed(text)
        if finish is not None:
            pieces += parser.finish()
        for piece in pieces:
            self._calls[index] += isinstance(piece, CallBegin)
            if isinstance(piece, str) or self._calls[index] <= self._max_calls:
                yield piece

    def _body(self, piece: Piece, index: int) -> Json:
        """The delta that a piece makes; of a call first the name, then text of its arguments."""
        if isinstance(piece, str):
            return {"content": piece}
        place = {"index": self._calls[index] - 1}
        if isinstance(piece, CallBegin):
            return {"tool_calls": [place | self._call(piece)]}
        return {"tool_calls": [place | {"function": {"arguments": piece.text}}]}

    @staticmethod
    def _call(begin: CallBegin) -> Json:
        function = {"name": begin.name, "arguments": ""}
        # Nine characters, all that Mistral's templates take when the call comes back.
        return {"id": uuid.uuid4().hex[:9], "type": "function", "function": function}

    def _reason(self, index: int, reason: FinishReason) -> str:
        return "tool_calls" if reason == "stop" and self._calls[index] else reason

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> Json | None:
        return chat_logprobs(self._texts, entries) if self._wanted else None

    @staticmethod
    def _delta(
        index: int, delta: Json, logprobs: Json | None = None, finish_reason: str | None = None
    ) -> Json:
        return {
            "index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason,
        }  # fmt: skip
