"""Prompts to token ids, off the event loop. It does not know HTTP or the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from pw.errors import RequestError
from pw.serving.openai.schemas import Prompts
from pw.serving.process.engine_protocol import TokenizerProtocol

T = TypeVar("T")

_MOST_RENDERED = 32 << 20  # characters; a template may make more of a body than it is worth
_CHARACTERS = 4  # to a token; a text that has no more of them than fit is encoded at once


@dataclass(frozen=True)
class EncodedPrompt:
    """One prompt, ready for the engine."""

    token_ids: list[int]
    text: str | None = None  # what `echo` repeats; None when it was not asked for


class PromptEncoder:
    """Runs templates and the tokenizer on one thread of its own.

    One thread, because a fast tokenizer changes its own settings during a call and is not safe
    to share, and because templates and long prompts would stall every stream on the event loop.
    """

    def __init__(self, tokenizer: TokenizerProtocol) -> None:
        self._tokenizer = tokenizer
        self._longest_token = max(1, tokenizer.longest_token)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pw-tokenizer")

    def close(self) -> None:
        """Stop the thread; prompts that wait for it are dropped."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def completion(
        self, prompts: Prompts, *, add_special_tokens: bool, with_text: bool, max_tokens: int
    ) -> list[EncodedPrompt]:
        """Encode the prompts of a completion request, all or none.

        Args:
            prompts: In any of the four forms.
            add_special_tokens: To prompts that are text.
            with_text: Give the text of each prompt, too.
            max_tokens: A text that must have more than these is refused before it is encoded.

        Raises:
            RequestError: A prompt is empty, too long, or has an id outside the vocabulary.
        """

        def encode_all() -> list[EncodedPrompt]:
            for prompt in split_prompts(prompts):
                if isinstance(prompt, str):
                    self._check_length(prompt, max_tokens, "prompt")
            return [
                self._encode_one(prompt, add_special_tokens, with_text)
                for prompt in split_prompts(prompts)
            ]

        return await self._call(encode_all)

    async def chat(
        self,
        messages: list[dict[str, Any]],
        options: dict[str, Any],
        max_tokens: int | None = None,
    ) -> list[EncodedPrompt]:
        """Render a conversation and encode it.

        Args:
            messages: As the template takes them.
            options: Of the template.
            max_tokens: A conversation that must have more than these is refused before it is
                encoded; None: none is.

        Raises:
            RequestError: With the template's own sentence.
        """

        def encode_all() -> list[EncodedPrompt]:
            variables = dict(options)
            special = variables.pop("add_special_tokens", False)  # templates write their own
            text = self._tokenizer.render_chat(messages, **variables)
            if len(text) > _MOST_RENDERED:
                raise RequestError(
                    f"conversation renders to more than {_MOST_RENDERED} characters: {len(text)}",
                    param="messages",
                )
            if max_tokens is not None:
                self._check_length(text, max_tokens, "messages")
            token_ids = self._tokenizer.encode(text, add_special_tokens=special)
            if not token_ids:
                raise RequestError("conversation renders to an empty prompt", param="messages")
            return [EncodedPrompt(token_ids)]

        return await self._call(encode_all)

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text, which may be none."""
        return await self._call(
            lambda: self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        )

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included.

        Raises:
            RequestError: An id outside the vocabulary.
        """
        self._check_ids(token_ids, "tokens")
        return await self._call(
            lambda: self._tokenizer.decode(token_ids, skip_special_tokens=False)
        )

    async def _call(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    def _check_length(self, text: str, max_tokens: int, param: str) -> None:
        """Refuse a text that cannot fit.

        Encoding megabytes would take a multiple of them, for ever, as allocators go, and keep all
        other prompts waiting. So a long text is first counted piece by piece, as far as needed: a
        piece begins and ends anywhere, which costs tokens, but never as many again.
        """
        piece = max_tokens * _CHARACTERS
        if len(text) <= piece:
            return
        counted = 0
        for at in range(0, len(text), piece):
            least = max(counted // 2, -(-len(text) // self._longest_token))
            if least > max_tokens:
                raise RequestError(
                    f"this model's maximum context length is {max_tokens} tokens, but the "
                    f"{len(text)} characters of the prompt are at least {least}",
                    code="context_length_exceeded",
                    param=param,
                )
            part = text[at : at + piece]
            counted += len(self._tokenizer.encode(part, add_special_tokens=False))

    def _encode_one(
        self, prompt: str | list[int], add_special_tokens: bool, with_text: bool
    ) -> EncodedPrompt:
        if isinstance(prompt, str):
            token_ids = self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
            if not token_ids and self._tokenizer.bos_token_id is not None:
                token_ids = [self._tokenizer.bos_token_id]
            text = prompt
        else:
            self._check_ids(prompt, "prompt")
            token_ids = prompt
            text = self._tokenizer.decode(prompt, skip_special_tokens=False) if with_text else ""
        if not token_ids:
            raise RequestError("prompt is empty and the model has no BOS token", param="prompt")
        return EncodedPrompt(token_ids, text if with_text else None)

    def _check_ids(self, token_ids: Sequence[int], param: str) -> None:
        size = self._tokenizer.vocab_size
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < size:
            wrong = next(token for token in token_ids if not 0 <= token < size)
            raise RequestError(
                f"token id is outside the vocabulary of {size}: {wrong}", param=param
            )


def count_prompts(prompts: Prompts) -> int:
    """Number of prompts in any of the four forms."""
    single = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))
    return 1 if single else len(prompts)


def split_prompts(prompts: Prompts) -> list[str | list[int]]:
    """The prompts of any of the four forms, one by one.

    Raises:
        RequestError: There is none.
    """
    if not isinstance(prompts, str) and not prompts:
        raise RequestError("prompt is an empty list", param="prompt")
    if isinstance(prompts, str) or isinstance(prompts[0], int):
        return [prompts]
    return list(prompts)
