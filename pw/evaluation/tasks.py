r"""Tasks in JSONL files: questions with choices, or with the text that should follow.

One JSON object a line; each needs `prompt` and at least one of `choices` and `target`:

    {"prompt": "Question: Which is larger, 3 or 8?\nAnswer:", "choices": [" 3", " 8"], "answer": 1}
    {"prompt": "The capital of France is", "target": "Paris"}

`answer` is the index of the right choice, `target` the text that a written answer is compared
with (by default the right choice). A blank is put between prompt and choice where neither side has
one. Other fields are ignored; `query` or `context` may stand for `prompt`, `gold` for `answer` and
`continuation` for `target`, as in published sets.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pw.errors import ConfigError
from pw.models.resolve import asset

BUNDLED = ("comparison", "sequence", "tracking")  # pw/assets/tasks/<name>.jsonl
_NAMES = {
    "prompt": ("prompt", "query", "context"),
    "answer": ("answer", "gold"),
    "target": ("target", "continuation"),
}


@dataclass(frozen=True)
class Item:
    """One question."""

    prompt: str
    choices: tuple[str, ...]  # () when there are none
    answer: int | None  # index of the right choice
    target: str  # the right answer as text, without blanks around it

    @property
    def right(self) -> str:
        """The right answer as it follows the prompt."""
        return follow(
            self.prompt, self.choices[self.answer] if self.answer is not None else self.target
        )


@dataclass(frozen=True)
class Task:
    """The items of a file."""

    name: str
    items: tuple[Item, ...]
    sha256: str  # of the file

    @property
    def has_choices(self) -> bool:
        """Whether the items are questions with choices (all are, or none)."""
        return bool(self.items[0].choices)

    @property
    def chance(self) -> float | None:
        """Expected share of right choices by guessing."""
        if not self.has_choices:
            return None
        return sum(1 / len(item.choices) for item in self.items) / len(self.items)


def follow(prompt: str, text: str) -> str:
    """A choice as it is put behind a prompt: with a blank where neither side has one."""
    return text if prompt[-1:].isspace() or text[:1].isspace() else f" {text}"


def load_task(name: str) -> Task:
    """Read a task.

    Args:
        name: A .jsonl file, or one of `BUNDLED`.

    Raises:
        ConfigError: The file is missing or a line is not an item.
    """
    path = asset("tasks") / f"{name}.jsonl" if name in BUNDLED else Path(name)
    try:
        data = path.read_bytes()
        lines = [line for line in data.decode("utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(
            f"cannot read the task `{name}`: {(error.strerror or str(error)).lower()}",
            f"name a .jsonl file, or {', '.join(BUNDLED)} (bundled)",
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8: `{name}`: {error.reason} at byte {error.start}") from error
    items = tuple(_item(line, f"{name}:{number}") for number, line in enumerate(lines, 1))
    if not items:
        raise ConfigError(f"the task holds no items: `{name}`")
    if len({bool(item.choices) for item in items}) > 1:
        raise ConfigError(f"some items have choices and some have none: `{name}`")
    return Task(path.stem, items, hashlib.sha256(data).hexdigest())


def _item(line: str, place: str) -> Item:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"not JSON: `{place}`: {error}") from error
    if not isinstance(record, dict):
        raise ConfigError(f"not a JSON object: `{place}`")
    values = {name: _field(record, names) for name, names in _NAMES.items()}
    prompt, answer, target = values["prompt"], values["answer"], values["target"]
    choices = record.get("choices") or []
    _check(isinstance(prompt, str) and bool(prompt.strip()), "prompt", prompt, "a text", place)
    _check(
        isinstance(choices, list) and all(isinstance(c, str) and c.strip() for c in choices),
        "choices",
        choices,
        "a list of texts",
        place,
    )
    _check(len(choices) != 1, "choices", choices, "more than one", place)
    if choices:
        _check(
            type(answer) is int and 0 <= answer < len(choices),
            "answer",
            answer,
            f"an index below {len(choices)}",
            place,
        )
        target = choices[answer] if target is None else target
    else:
        answer = None
    _check(isinstance(target, str) and bool(target.strip()), "target", target, "a text", place)
    return Item(prompt, tuple(choices), answer, target.strip())


def _field(record: dict[str, Any], names: Sequence[str]) -> Any:
    return next((record[name] for name in names if name in record), None)


def _check(ok: bool, name: str, value: object, expected: str, place: str) -> None:
    if not ok:
        shown = json.dumps(value, ensure_ascii=False)[:60]
        raise ConfigError(
            f"`{name}` must be {expected}: {shown}: `{place}`", "see `pw eval --help`"
        )


def limited(task: Task, limit: float | None) -> tuple[Item, ...]:
    """The first items of a task.

    Args:
        task: All items.
        limit: A count, or below 1 a share, as in lm-evaluation-harness.

    Raises:
        ConfigError: It is not positive.
    """
    if limit is None:
        return task.items
    if limit <= 0:
        raise ConfigError(f"--limit must be a positive count or share: {limit:g}")
    count = int(limit) if limit >= 1 else max(1, int(limit * len(task.items)))
    return task.items[:count]


def examples(task: Task, index: int, count: int, seed: int) -> tuple[Item, ...]:
    """Few-shot examples for item `index`: others of the same task, drawn by seed.

    Raises:
        ConfigError: There are not enough.
    """
    if not 0 <= count < len(task.items):
        raise ConfigError(
            f"--num-fewshot must be below the {len(task.items)} items of `{task.name}`: {count}"
        )
    others = [place for place in range(len(task.items)) if place != index]
    drawn = random.Random(f"{seed}:{index}").sample(others, count)
    return tuple(task.items[place] for place in drawn)
