"""Text to token ids and back, chat templates, and the ids that end a generation.

Templates come from the checkpoint and run in transformers' sandbox, for a limited time; what they
refuse is the caller's error and is told in the template's own words.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from transformers import AutoTokenizer

from pw.errors import ModelError, RequestError
from pw.models.pointers import refuse_pointer

_FETCH_AGAIN = "correct the file, or fetch it again"
_TEMPLATE_HINT = "see chat_template.jinja or tokenizer_config.json of the model"
TEMPLATE_SECONDS = 5.0  # for one conversation; an honest template needs milliseconds
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
_INFO_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


class Tokenizer:
    """The tokenizer of a checkpoint or artifact folder. Make it with `load_tokenizer`.

    Attributes:
        inner: The tokenizer of transformers.
        eos_token_ids: Ids that end a generation, ascending.
        vocab_size: One more than the largest id.
        longest_token: Characters of text that one token holds at most.
    """

    def __init__(self, inner: Any, eos_token_ids: tuple[int, ...]) -> None:
        self.inner = inner
        self.eos_token_ids = eos_token_ids
        vocabulary: dict[str, int] = inner.get_vocab()
        self.vocab_size = max(vocabulary.values()) + 1
        self.longest_token = max(map(len, vocabulary))  # in the vocabulary's own spelling

    @property
    def bos_token_id(self) -> int | None:
        """Id that begins a text, if the model has one."""
        identity: int | None = self.inner.bos_token_id
        return identity

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` can work."""
        return bool(self.inner.chat_template)

    @property
    def chat_template(self) -> str:
        """Source of the chat template, of all of them if there are several; "" if none."""
        source = self.inner.chat_template or ""
        return "\n".join(source.values()) if isinstance(source, dict) else str(source)

    def use_template(self, source: str) -> None:
        """Take another chat template than the model's own."""
        self.inner.chat_template = source

    def is_special(self, text: str) -> bool:
        """Whether a text is one special token, which answers leave out."""
        return text in self.inner.all_special_tokens

    def info(self) -> dict[str, Any]:
        """What remote users of the tokenizer need to know: special tokens, template, sizes."""
        names = {name: getattr(self.inner, name) for name in _INFO_NAMES}
        ids = {f"{name}_id": getattr(self.inner, f"{name}_id") for name in _INFO_NAMES}
        return {
            "tokenizer_class": type(self.inner).__name__,
            "vocab_size": self.vocab_size,
            **names,
            **ids,
            "eos_token_ids": list(self.eos_token_ids),
            "additional_special_tokens": list(self.inner.all_special_tokens),
            "chat_template": self.inner.chat_template,
        }

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

        The role `developer` is told to templates that do not know it as `system`, OpenAI's older
        word for it.

        Raises:
            RequestError: The model has no template, or the template refuses the messages.
        """
        if not self.has_chat_template:
            raise RequestError(
                "this model has no chat template",
                param="messages",
                hint="use /v1/completions with a plain prompt, or serve with --chat-template",
            )
        source = self.chat_template
        if variables.get("tools") and "tools" not in source:
            raise RequestError(
                "the model's chat template knows no tools",
                code="unsupported_parameter",
                param="tools",
                hint="serve with a --chat-template that does, or set tool_choice to `none`",
            )
        renamed = {} if "developer" in source else {"developer": "system"}
        try:
            with _time_limit(TEMPLATE_SECONDS):
                text: str = self.inner.apply_chat_template(
                    [_with_role(message, renamed) for message in messages],
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    **variables,
                )
        except Exception as error:  # a template is a program of its own: whatever it raises
            sentence = str(error).strip() or type(error).__name__
            raise RequestError(
                f"the model's chat template refuses these messages: {sentence}",
                param="messages",
                hint=_TEMPLATE_HINT,
            ) from error
        return text

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_special_tokens: bool = False,
        **options: Any,
    ) -> list[int]:
        """Token ids of a conversation; see `render_chat`. Templates write special tokens."""
        text = self.render_chat(messages, **options)
        return self.encode(text, add_special_tokens=add_special_tokens)


def _with_role(message: Mapping[str, Any], renamed: Mapping[str, str]) -> dict[str, Any]:
    role = message.get("role", "")
    return {**message, "role": renamed.get(role, role)}


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Make Python code in this thread raise `TimeoutError` when the time is over."""
    deadline = time.monotonic() + seconds

    def trace(_frame: FrameType, _event: str, _argument: Any) -> Any:
        if time.monotonic() > deadline:
            raise TimeoutError(f"it took longer than {seconds:g} s")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a checkpoint or artifact folder. Never runs code from it.

    Raises:
        ModelError: There is none, or it cannot be read.
    """
    try:
        inner = AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        for name in _TOKENIZER_FILES:
            refuse_pointer(path / name)
        if not any((path / name).is_file() for name in _TOKENIZER_FILES):
            reason = f"it has none of {', '.join(_TOKENIZER_FILES)}"
        else:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"no readable tokenizer in `{path}`: {reason}",
            "copy the tokenizer's files of the original checkpoint beside its config.json",
        ) from error
    return Tokenizer(inner, tuple(sorted(_eos_ids(path, inner))))


def _eos_ids(path: Path, inner: Any) -> set[int]:
    """Ids of generation_config.json, else of config.json, and the tokenizer's own."""
    ids = {inner.eos_token_id} if inner.eos_token_id is not None else set()
    for name in ("generation_config.json", "config.json"):
        if stated := _stated_eos(path / name):
            return ids | stated
    return ids


def _stated_eos(file: Path) -> set[int]:
    """Ids of `eos_token_id` in a file of settings; none where it or the file is absent."""
    if not file.is_file():
        return set()
    refuse_pointer(file)
    try:
        stated = json.loads(file.read_bytes()).get("eos_token_id")
    except (ValueError, AttributeError, RecursionError) as error:
        raise ModelError(f"not a readable file: `{file}` ({error})", _FETCH_AGAIN) from error
    found = stated if isinstance(stated, list) else [] if stated is None else [stated]
    if not all(type(each) is int for each in found):
        raise ModelError(f"eos_token_id of `{file}` is no id: `{str(stated)[:80]}`", _FETCH_AGAIN)
    return set(found)
