"""Predictions for ways of holding tables."""

from __future__ import annotations

import pytest

from pw.evaluation.lab.room import Room, Texts
from pw.evaluation.lab.studies import held_tables
from support.engines import make_artifact


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Room:
    folder = tmp_path_factory.mktemp("held")
    widths = {"num_attention_heads": 2, "hidden_size": 256, "moe_intermediate_size": 256}
    make_artifact("qwen2_moe", folder, num_hidden_layers=1, **widths)
    return Room(folder / "model.pw", folder / "checkpoint", Texts(folder / "no", folder / "no"))


def test_fewer_bytes_of_tables_lose_less_within_the_same_bytes(place: Room) -> None:
    found = held_tables.run(place)
    loss = {row["way"]: row["predicted"] for row in found["rows"]}
    assert all(row["bytes"] <= 0.28 * place.dense_bytes for row in found["rows"])
    assert all(sum(row["blocks"]) == place.model.geometry.blocks for row in found["rows"])
    ways = [
        "tables of 2 and 3 bits always, pages of 4 KiB",
        "tables of 2 bits always, pages of 4 KiB",
        "the table in use alone, pages of 4 KiB",
        "the table in use alone, 4 KiB shared",
        "2 KiB shared, no padding",
        "tables for nothing",
    ]
    assert [loss[way] for way in ways] == sorted([loss[way] for way in ways], reverse=True)
    assert loss[ways[0]] > loss[ways[-1]]
    lines = held_tables.tables(found).splitlines()
    assert len(lines) == 2 + len(found["rows"])
