"""Kinds of text that route differently: prose, code, key-value prompts, small reasoning tasks.

Windows of one length; the second half of each is scored, the first is the prompt that the planner
sees. Task windows are items one after the other, each with its right answer.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from pw.errors import ConfigError
from pw.evaluation.lab.lab import Window
from pw.evaluation.lab.room import Room
from pw.evaluation.lab.texts import read_documents, spread_windows

PROSE = ("classic", "gut", "novels100", "clic", "speeches")
CODE = ("code",)
TASKS = {"key-value": ("kv_retrieval_512",), "reasoning": ("tracking", "sequence", "comparison")}
GROUPS = ("prose", "code", *TASKS)


def group_windows(room: Room, kind: str, count: int, length: int) -> list[Window]:
    """At most `count` windows of `length` tokens of one kind of text."""
    texts = room.texts
    if kind in TASKS:
        if texts.tasks is None:
            raise ConfigError(f"the group `{kind}` needs a folder of task files", "give --tasks")
        documents = [_items(texts.tasks, TASKS[kind])]
    else:
        sources = PROSE if kind == "prose" else CODE
        documents = read_documents(texts.heldout, sources, texts.without)
    windows = spread_windows(documents, room.tokenizer, length, count)
    return [Window(ids, length // 2) for ids in windows]


def _items(folder: Path, tasks: tuple[str, ...]) -> str:
    """All items of some tasks as one text, in an order drawn once."""
    items = []
    for task in tasks:
        for line in (folder / f"{task}.jsonl").read_text("utf-8").splitlines():
            row = json.loads(line)
            items.append(row["prompt"] + row["choices"][row["answer"]])
    order = np.random.default_rng(0).permutation(len(items))
    return "\n\n".join(items[i] for i in order)
