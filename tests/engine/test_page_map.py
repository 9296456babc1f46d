"""The picture of the arena: every page once, labelled as the books say."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from pw.engine.page_map import KINDS, _majority, page_map
from pw.engine.request import SamplingParams
from support.engines import open_engine, random_prompt, tight_budget


def check_against_the_books(engine: Any) -> Counter[str]:
    picture, status, parts = page_map(engine._parts), engine.status(), engine._parts
    counts = Counter(picture["counts"])
    assert sum(counts.values()) == picture["pages"] == status.pages_total
    assert picture["pages_per_cell"] == 1
    assert Counter(picture["cells"]) == +counts
    assert (counts["K"], counts["C"]) == (status.pages_kv, status.pages_cached)
    assert counts["F"] + counts["C"] == status.pages_free
    assert sum(counts[kind] for kind in "01234567LM") == status.pages_weights
    for index, planes in enumerate(parts.table._plane_pages):
        for number, pages in enumerate(planes):
            assert {picture["cells"][page] for page in pages} == {str(number)}, index
    for sequence in parts.kv.sequences.values():
        assert {picture["cells"][page] for page in parts.kv.pages_of(sequence)} <= {"K"}
    moving = [page for move in parts.table.in_transfer.values() for page in move.pages]
    assert {picture["cells"][page] for page in moving} <= {"M"}
    assert counts["M"] == len(moving)
    return counts


def test_labels_follow_pages_through_a_squeeze(qwen: tuple[Any, Path]) -> None:
    _, artifact = qwen
    budget = tight_budget(artifact, kv_tokens=80)
    engine = open_engine(artifact, memory_budget=budget, planner_low_watermark=0.01)
    before = check_against_the_books(engine)
    for number in range(5):
        engine.add_request(f"r{number}", random_prompt(150, number), SamplingParams(max_tokens=8))
    most_kv = fewest_planes = before
    while engine.has_work():
        engine.step()
        now = check_against_the_books(engine)
        most_kv = max(most_kv, now, key=lambda counts: counts["K"])
        fewest_planes = min(fewest_planes, now, key=lambda counts: counts["5"])
    assert most_kv["K"] > 0
    assert fewest_planes["5"] < before["5"]  # the last plane is what is given up first
    seen_moving = False
    for _ in range(100):
        engine.idle_turn()
        seen_moving |= check_against_the_books(engine)["M"] > 0
    assert seen_moving
    assert check_against_the_books(engine) == before


def test_a_large_arena_is_shown_by_what_most_pages_of_a_run_hold(qwen: tuple[Any, Path]) -> None:
    engine = open_engine(qwen[1])
    full, small = page_map(engine._parts), page_map(engine._parts, cells=50)
    assert len(small["cells"]) <= 50 < full["pages"]
    assert small["counts"] == full["counts"]
    assert len(small["cells"]) == -(-full["pages"] // small["pages_per_cell"])
    labels = np.array([0, 10, 10, 11, 11, 10, 3], dtype=np.uint8)
    assert [KINDS[kind] for kind in _majority(labels, 3)] == ["K", "F", "3"]


def test_an_engine_without_planes_has_kv_and_free_pages_only(qwen: tuple[Any, Path]) -> None:
    picture = page_map(open_engine(qwen[1], "dense")._parts)
    assert set(picture["cells"]) <= {"K", "F"}
