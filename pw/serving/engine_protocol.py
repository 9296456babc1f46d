"""What the server needs from the engine and from the tokenizer, and nothing more."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from pw.engine.request import EngineStatus, RequestOutput, SamplingParams


class AsyncEngineProtocol(Protocol):
    """The engine as seen from the event loop."""

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
        """A snapshot; cheap, and safe to take while a step runs."""

    @property
    def failed(self) -> bool:
        """Whether a fault of its own ended the engine; nothing brings it back."""

    def healthy(self) -> bool:
        """Whether the engine runs and makes progress when it has work."""

    def start(self) -> None:
        """Start stepping. Called once, before the first request."""

    async def shutdown(self, drain_seconds: float) -> None:
        """Finish what runs for at most `drain_seconds`, then stop."""


class TokenizerProtocol(Protocol):
    """The part of `pw.models.tokenizer.Tokenizer` that is used here."""

    vocab_size: int

    @property
    def bos_token_id(self) -> int | None:
        """Id that begins a text, if the model has one."""

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` can work."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD."""

    def spelling(self, token_id: int) -> str:
        """The vocabulary's own form of one token."""

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Token ids of a conversation.

        Raises:
            RequestError: With the chat template's own sentence.
        """
