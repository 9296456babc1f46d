"""Windows of tokens from text files. Knows no model beyond its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pw.errors import ConfigError
from pw.evaluation.lab.lab import Window
from pw.evaluation.perplexity import cut_chunks
from pw.models.tokenizer import Tokenizer


def read_documents(
    path: Path, sources: Collection[str] = (), without: Collection[int] = ()
) -> list[str]:
    """Documents of a `.txt` (one) or of a `.jsonl` with `text` and maybe `source` in each line.

    Args:
        path: The file.
        sources: Only documents of these sources; empty: of all.
        without: Numbers of documents to leave out, from 0.

    Raises:
        ConfigError: The file cannot be read or holds no such document.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read text file: `{path}`: {error}") from error
    if path.suffix != ".jsonl":
        return [text]
    rows = _rows(path, text)
    found = [
        str(row["text"])
        for number, row in enumerate(rows)
        if number not in without and (not sources or row.get("source") in sources)
    ]
    if not found:
        raise ConfigError(f"no document of {sorted(sources)} in `{path}`")
    return found


def spread_windows(
    documents: list[str], tokenizer: Tokenizer, length: int, count: int
) -> list[Tensor]:
    """At most `count` windows of `length` tokens, evenly spaced over the joined documents.

    The same cut as `pw eval` makes; a model that begins every text with a token gets it.
    """
    tokens = tokenizer.encode("\n\n".join(documents), add_special_tokens=False)
    bare, full = (tokenizer.encode("a", add_special_tokens=flag) for flag in (False, True))
    chunks = cut_chunks(tokens, length, prefix=full[: len(full) - len(bare)])
    places = np.linspace(0, len(chunks) - 1, min(count, len(chunks))).round().astype(int)
    return [torch.tensor(chunks[place]) for place in places]


def task_windows(path: Path, tokenizer: Tokenizer, count: int) -> list[Window]:
    """Prompts of a task file with their right answers; only the answers are scored.

    Args:
        path: A `.jsonl` with `prompt`, `choices` and `answer` (an index) in each line.
        tokenizer: Of the model.
        count: Items, from the first.
    """
    windows = []
    for row in _rows(path, path.read_text("utf-8"))[:count]:
        prompt = tokenizer.encode(row["prompt"])
        answer = tokenizer.encode(row["choices"][row["answer"]], add_special_tokens=False)
        windows.append(Window(torch.tensor([*prompt, *answer]), len(prompt)))
    return windows


def _rows(path: Path, text: str) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise ConfigError(f"not JSON lines: `{path}`: {error}") from error
