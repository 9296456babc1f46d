"""The JSON of answers: whole ones and the chunks of a stream, for both endpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from pw.engine.request import FinishReason, RequestOutput, TokenLogprob
from pw.serving.generation import SequenceSpec
from pw.serving.logprobs import CompletionLogprobs, TokenTexts, chat_logprobs

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
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    finish_reason: FinishReason | None = None
    completion_tokens: int = 0

    def add(self, output: RequestOutput) -> None:
        """Append an output."""
        self.text += output.text
        self.logprobs.extend(output.logprobs)
        self.prompt_logprobs = self.prompt_logprobs or output.prompt_logprobs
        self.finish_reason = output.finish_reason
        self.completion_tokens = output.completion_tokens


class Writer(Protocol):
    """Spells one endpoint's answer. `index` counts the sequences of the request."""

    def deltas(self, index: int, output: RequestOutput) -> list[Json]:
        """Chunk choices for a sequence's next output; none when it holds no news."""

    def choice(self, index: int, choice: Choice) -> Json:
        """A finished choice."""

    def answer(self, choices: list[Json], usage: Json) -> Json:
        """The whole answer."""

    def chunk(self, choices: list[Json]) -> Json:
        """One chunk of a stream."""


class CompletionWriter:
    """`/v1/completions`."""

    id_prefix = "cmpl"

    def __init__(self, head: Head, sequences: list[SequenceSpec], texts: TokenTexts) -> None:
        self._head = head
        self._sequences = sequences
        self._logprobs = [CompletionLogprobs(texts) for _ in sequences]
        self._opened: set[int] = set()

    def deltas(self, index: int, output: RequestOutput) -> list[Json]:
        """One chunk choice per output that has text, logprobs or the end; the first echoes."""
        text = output.text
        if index not in self._opened:
            self._opened.add(index)
            text = self._echo(index) + text
        logprobs = self._lists(index, output.prompt_logprobs, output.logprobs)
        if not text and logprobs is None and output.finish_reason is None:
            return []
        return [self._choice(index, text, logprobs, output.finish_reason)]

    def choice(self, index: int, choice: Choice) -> Json:
        """A finished choice, after the prompt where `echo` asks for it."""
        logprobs = self._lists(index, choice.prompt_logprobs, choice.logprobs)
        return self._choice(index, self._echo(index) + choice.text, logprobs, choice.finish_reason)

    def answer(self, choices: list[Json], usage: Json) -> Json:
        """The whole answer."""
        return self.chunk(choices) | {"usage": usage}

    def chunk(self, choices: list[Json]) -> Json:
        """One chunk; completions use one `object` for both."""
        return {"object": "text_completion", **vars(self._head), "choices": choices}

    def _echo(self, index: int) -> str:
        return self._sequences[index].prompt.text or ""

    def _lists(
        self,
        index: int,
        prompt_logprobs: tuple[TokenLogprob | None, ...],
        logprobs: tuple[TokenLogprob, ...] | list[TokenLogprob],
    ) -> Json | None:
        if self._sequences[index].params.logprobs is None:
            return None
        if not prompt_logprobs and not logprobs:
            return None
        prompt = zip(self._sequences[index].prompt.token_ids, prompt_logprobs, strict=False)
        entries = [*prompt, *((entry.token_id, entry) for entry in logprobs)]
        return self._logprobs[index].lists(entries)

    @staticmethod
    def _choice(
        index: int, text: str, logprobs: Json | None, finish_reason: FinishReason | None
    ) -> Json:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


class ChatWriter:
    """`/v1/chat/completions`."""

    id_prefix = "chatcmpl"

    def __init__(self, head: Head, sequences: list[SequenceSpec], texts: TokenTexts) -> None:
        self._head = head
        self._sequences = sequences
        self._texts = texts
        self._opened: set[int] = set()

    def deltas(self, index: int, output: RequestOutput) -> list[Json]:
        """Chunk choices of their own for the role, for text or logprobs, and for the end."""
        logprobs = self._lists(index, output.logprobs) if output.logprobs else None
        deltas = []
        if index not in self._opened:
            self._opened.add(index)
            deltas.append(self._delta(index, {"role": "assistant", "content": ""}, None, None))
        if output.text or logprobs:
            deltas.append(self._delta(index, {"content": output.text}, logprobs, None))
        if output.finish_reason is not None:
            deltas.append(self._delta(index, {}, None, output.finish_reason))
        return deltas

    def choice(self, index: int, choice: Choice) -> Json:
        """A finished choice."""
        return {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._lists(index, choice.logprobs),
            "finish_reason": choice.finish_reason,
        }

    def answer(self, choices: list[Json], usage: Json) -> Json:
        """The whole answer."""
        head = {"object": "chat.completion", **vars(self._head)}
        return {**head, "choices": choices, "usage": usage}

    def chunk(self, choices: list[Json]) -> Json:
        """One chunk."""
        return {"object": "chat.completion.chunk", **vars(self._head), "choices": choices}

    def _lists(
        self, index: int, logprobs: tuple[TokenLogprob, ...] | list[TokenLogprob]
    ) -> Json | None:
        if self._sequences[index].params.logprobs is None:
            return None
        return chat_logprobs(self._texts, logprobs)

    @staticmethod
    def _delta(
        index: int, delta: Json, logprobs: Json | None, finish_reason: FinishReason | None
    ) -> Json:
        return {
            "index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason,
        }  # fmt: skip


def usage_of(prompt_tokens: int, completion_tokens: int) -> Json:
    """The `usage` object: each prompt counted once, completions summed."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
