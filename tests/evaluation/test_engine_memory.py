"""The study of memory that changes while an engine serves."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pw.evaluation.lab import room
from pw.evaluation.lab.room import Room, Texts
from pw.evaluation.lab.studies import engine_memory
from support.engines import make_artifact


def test_contexts_take_bits_and_give_them_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_artifact("qwen2_moe", tmp_path, num_attention_heads=2)
    letters = np.random.default_rng(2).integers(97, 123, 9000)
    (tmp_path / "heldout.jsonl").write_text(json.dumps({"text": "".join(map(chr, letters))}))
    monkeypatch.setattr(room, "WINDOW", 64)
    monkeypatch.setattr(engine_memory, "LONGEST", 32)
    monkeypatch.setattr(engine_memory, "RUNNING", 3)
    monkeypatch.setattr(engine_memory, "PEAK_BITS", (2.4,))
    monkeypatch.setattr(engine_memory, "POLICIES", ("adaptive", "static:2", "dense"))
    texts = Texts(tmp_path / "no", tmp_path / "heldout.jsonl", windows=8)
    found = engine_memory.run(Room(tmp_path / "model.pw", tmp_path / "checkpoint", texts))
    rows = {row["policy"]: row for row in found["rows"]}
    assert rows["adaptive"]["least_bits"] < rows["adaptive"]["mean_bits"] < 6
    assert rows["adaptive"]["transitions"] > 0
    assert rows["static:2"]["mean_bits"] == 2
    assert rows["static:2"]["transitions"] == rows["adaptive"]["preemptions"] == 0
    assert rows["adaptive"]["kl"]["mean"] < rows["static:2"]["kl"]["mean"]
    assert rows["dense"]["nll"]["mean"] == 0  # it fits: the windows are short, so is the KV
    assert rows["dense"]["kl"]["mean"] < rows["adaptive"]["kl"]["mean"]
    assert len(engine_memory.tables(found).splitlines()) == 2 + len(rows)
