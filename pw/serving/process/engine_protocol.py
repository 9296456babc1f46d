"""What the server needs from the engine and from the tokenizer, and nothing more."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from pw.engine.process.wire import EngineInfo
from pw.engine.request import EngineStatus, RequestOutput, SamplingParams


class AsyncEngineProtocol(Protocol):
    """The engine as seen from the event loop."""

    @property
    def info(self) -> EngineInfo:
        """What does not change while the engine lives."""

    def generate(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams
    ) -> AsyncIterator[RequestOutput]:
        """Run one sequence; the last output has its `finish_reason` set.

        Closing or cancelling the iterator gives the sequence up.

        Raises:
            RequestError: The engine refuses the sequence; with the first output or instead of it.
        """

    def abort(self, request_id: str) -> None:
        """Give a sequence up within one step. Unknown and finished ids are ignored."""

    def status(self) -> EngineStatus:
        """A snapshot; cheap, never fails: of an engine that has failed it is the last one."""

    async def precision_map(self) -> dict[str, Any]:
        """Bits of every block, as JSON has it; taken between two steps.

        Raises:
            RequestError: The engine cannot answer now.
        """

    async def set_policy(self, policy: str) -> None:
        """Follow another precision policy from the next step on: `adaptive` or `static:<bits>`.

        Raises:
            RequestError: This engine cannot follow it.
        """

    @property
    def failed(self) -> bool:
        """Whether a fault of its own ended the engine; nothing brings it back."""

    @property
    def failure(self) -> str | None:
        """That fault in a line; None of an engine that has not failed."""

    def healthy(self) -> bool:
        """Whether the engine's loop has made a turn lately."""

    def start(self) -> None:
        """Begin to serve. Called once, in the event loop, before the first request."""

    async def shutdown(self, drain_seconds: float) -> None:
        """Take no more requests, finish what runs for at most so long, then end the engine."""


class TokenizerProtocol(Protocol):
    """The part of `pw.models.tokenizer.Tokenizer` that is used here."""

    vocab_size: int

    @property
    def bos_token_id(self) -> int | None:
        """Id that begins a text, if the model has one."""

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` can work."""

    @property
    def chat_template(self) -> str:
        """Source of the template; "" if there is none."""

    @property
    def longest_token(self) -> int:
        """Characters of text that one token holds at most."""

    def is_special(self, text: str) -> bool:
        """Whether a text is one special token."""

    def info(self) -> dict[str, Any]:
        """What remote users of the tokenizer need to know."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD."""

    def spelling(self, token_id: int) -> str:
        """The vocabulary's own form of one token."""

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Text of a conversation in the model's template, special tokens spelled out.

        Raises:
            RequestError: With the chat template's own sentence.
        """
