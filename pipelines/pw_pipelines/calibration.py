"""Calibration text: a file to documents to windows of tokens, the same for the same settings.

Knows nothing of models beyond a tokenizer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pw.config import CalibrationConfig
from pw.errors import ConfigError, RequestError

Document = str | list[dict[str, Any]]  # plain text, or the messages of a chat

_FORMATS = "give a .jsonl with `text` or `messages` in each line, or a .txt"


class Tokenizer(Protocol):
    """What windows need of a tokenizer (`pw.models.tokenizer.Tokenizer` has it)."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""
        ...

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool
    ) -> str:
        """Text of a chat in the model's template."""
        ...


@dataclass(frozen=True)
class CalibrationSet:
    """Windows of tokens, each a prompt of its own."""

    windows: Tensor  # [P, seqlen] int64
    documents: tuple[int, ...]  # P: document of each window, for splits that must not mix them
    available: int  # windows that the text would have given

    @property
    def digest(self) -> str:
        """Sha256 of the windows: the identity of this input in an artifact."""
        data = self.windows.numpy().astype("<i8")
        return hashlib.sha256(f"{data.shape}".encode() + data.tobytes()).hexdigest()


def calibration_set(
    config: CalibrationConfig, tokenizer: Tokenizer, vocabulary: int | None = None
) -> CalibrationSet:
    """Read, tokenize and cut the calibration text of `config`.

    Args:
        config: Which text.
        tokenizer: The model's.
        vocabulary: Tokens that the model knows; None = all.

    Raises:
        ConfigError: The file is missing, malformed, empty or shorter than one window, or has a
            token that the model does not know.
    """
    documents = load_documents(config.dataset)
    prefix = bos_prefix(tokenizer)
    tokens = [
        tokenizer.encode(_plain_text(document, tokenizer), add_special_tokens=False)
        for document in documents
    ]
    found = cut_windows(tokens, config, prefix)
    most = int(found.windows.max())
    if vocabulary is not None and most >= vocabulary:
        raise ConfigError(
            f"calibration text has token {most}, the model knows {vocabulary}, from 0: "
            f"`{config.dataset}`",
            "the tokenizer is not this model's, or the text has tokens that were added to it",
        )
    return found


def bos_prefix(tokenizer: Tokenizer) -> list[int]:
    """Tokens that the tokenizer puts before any text (Gemma's BOS), usually none."""
    bare = tokenizer.encode("a", add_special_tokens=False)
    full = tokenizer.encode("a", add_special_tokens=True)
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start]
    return []


def load_documents(dataset: str) -> list[Document]:
    """Documents of a `.jsonl` or `.txt` file or of the bundled text; blank ones are left out.

    Raises:
        ConfigError: The file is missing, malformed or holds no text.
    """
    if dataset == "bundled":
        text = resources.files("pw").joinpath("assets", "calibration.jsonl").read_text("utf-8")
        documents = list(_parse_lines(text, "bundled"))
    else:
        path = Path(dataset)
        text = _read(path)
        documents = list(_parse_lines(text, dataset)) if path.suffix == ".jsonl" else [text]
    documents = [d for d in documents if (d.strip() if isinstance(d, str) else d)]
    if not documents:
        raise ConfigError(f"text file holds no text: `{dataset}`", _FORMATS)
    return documents


def cut_windows(
    documents: Sequence[Sequence[int]], config: CalibrationConfig, prefix: Sequence[int] = ()
) -> CalibrationSet:
    """Cut tokenized documents into windows of `seqlen` tokens and draw `nsamples` of them.

    What is left at the end of documents is joined, in order, into further windows; such a window
    counts to the document in which it begins. The draw depends on the seed only.

    Raises:
        ConfigError: There are fewer tokens than one window takes.
    """
    length = config.seqlen - len(prefix)
    windows: list[tuple[int, Sequence[int]]] = []
    rest: list[int] = []
    rest_document = 0
    for number, tokens in enumerate(documents):
        whole = len(tokens) // length * length
        windows += [(number, tokens[i : i + length]) for i in range(0, whole, length)]
        rest_document = rest_document if rest else number
        rest += tokens[whole:]
        if len(rest) >= length:
            windows.append((rest_document, rest[:length]))
            rest, rest_document = rest[length:], number
    if not windows:
        raise ConfigError(
            f"calibration text holds {len(rest)} tokens, one window takes {length}",
            "use more text or a smaller --seqlen",
        )
    order = np.random.default_rng(config.seed).permutation(len(windows))[: config.nsamples]
    drawn = [windows[i] for i in order]
    return CalibrationSet(
        windows=torch.tensor([[*prefix, *tokens] for _, tokens in drawn], dtype=torch.int64),
        documents=tuple(number for number, _ in drawn),
        available=len(windows),
    )


def _read(path: Path) -> str:
    if path.suffix not in (".jsonl", ".txt"):
        raise ConfigError(f"unknown kind of text file: `{path}`", _FORMATS)
    try:
        return path.read_text("utf-8-sig")
    except OSError as error:
        raise ConfigError(
            f"cannot read text file: `{path}`: {error.strerror}",
            "" if path.is_absolute() else f"a path counts from `{Path.cwd()}`",
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"text file is not UTF-8 at byte {error.start}: `{path}`") from error


def _parse_lines(text: str, name: str) -> Iterator[Document]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"line {number} of `{name}` is not JSON: {error}") from error
        document = _document_of(record)
        if document is None:
            raise ConfigError(
                f"line {number} of `{name}` has no string `text` and no list `messages`", _FORMATS
            )
        yield document


def _document_of(record: object) -> Document | None:
    if not isinstance(record, dict):
        return None
    text, messages = record.get("text"), record.get("messages")
    if isinstance(text, str):
        return text
    if isinstance(messages, list) and all(isinstance(m, dict) and "role" in m for m in messages):
        return messages
    return None


def _plain_text(document: Document, tokenizer: Tokenizer) -> str:
    if isinstance(document, str):
        return document
    try:
        return tokenizer.render_chat(document, add_generation_prompt=False)
    except RequestError as error:
        raise ConfigError(f"text file: {error.message}", error.hint) from error
