"""Text to token ids and back, chat templates, and the ids that end a generation.

Templates come from the checkpoint and run in transformers' sandbox; what they refuse is the
caller's error and is told in the template's own words.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer

from pw.errors import ModelError, RequestError

_TEMPLATE_HINT = "see chat_template.jinja or tokenizer_config.json of the model"


class Tokenizer:
    """The tokenizer of a checkpoint or artifact folder. Make it with `load_tokenizer`.

    Attributes:
        inner: The tokenizer of transformers.
        eos_token_ids: Ids that end a generation, ascending.
        vocab_size: One more than the largest id.
    """

    def __init__(self, inner: Any, eos_token_ids: tuple[int, ...]) -> None:
        self.inner = inner
        self.eos_token_ids = eos_token_ids
        self.vocab_size = max(inner.get_vocab().values()) + 1

    @property
    def bos_token_id(self) -> int | None:
        """Id that begins a text, if the model has one."""
        identity: int | None = self.inner.bos_token_id
        return identity

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` can work."""
        return bool(self.inner.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, as the model was trained to see a fresh text."""
        ids: list[int] = self.inner.encode(
            text, add_special_tokens=add_special_tokens, verbose=False
        )
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids. Bytes that are not UTF-8 become U+FFFD."""
        text: str = self.inner.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def spelling(self, token_id: int) -> str:
        """The vocabulary's own form of one token, e.g. `Ġthe` or `<0xE2>`; "" if it has none."""
        return self.inner.convert_ids_to_tokens(token_id) or ""

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Text of a conversation in the model's template.

        Raises:
            RequestError: The model has no template, or the template refuses the messages.
        """
        if not self.has_chat_template:
            raise RequestError(
                "this model has no chat template",
                param="messages",
                hint="use /v1/completions with a plain prompt",
            )
        try:
            text: str = self.inner.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            sentence = str(error).strip() or type(error).__name__
            raise RequestError(
                f"the model's chat template refuses these messages: {sentence}",
                param="messages",
                hint=_TEMPLATE_HINT,
            ) from error
        return text

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Token ids of a conversation; see `render_chat`. The template writes special tokens."""
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a checkpoint or artifact folder. Never runs code from it.

    Raises:
        ModelError: There is none, or it cannot be read.
    """
    try:
        inner = AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"no readable tokenizer in `{path}`: {reason}") from error
    return Tokenizer(inner, tuple(sorted(_eos_ids(path, inner))))


def _eos_ids(path: Path, inner: Any) -> set[int]:
    """Ids of generation_config.json, else of config.json, and the tokenizer's own."""
    ids = {inner.eos_token_id} if inner.eos_token_id is not None else set()
    for name in ("generation_config.json", "config.json"):
        file = path / name
        try:
            stated = json.loads(file.read_bytes()).get("eos_token_id") if file.is_file() else None
        except ValueError as error:
            raise ModelError(f"not a readable file: `{file}` ({error})") from error
        if stated is not None:
            return ids | set(stated if isinstance(stated, list) else [stated])
    return ids
