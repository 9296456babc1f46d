"""What befalls a comparison of policies: interrupts, cells that break, a device that is lost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pw.config import EngineConfig
from pw.engine import Engine
from pw.errors import EngineLostError, PwError
from pw.evaluation.bench.filling import fill
from pw.evaluation.bench.matrix import run_matrix
from pw.evaluation.bench.tables import report
from support.small_matrix import CONFIG, SMALL, write_model

TWO = replace(SMALL, policies=("static:3", "dense"))
FAULT = RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("matrix"))


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each engine that was closed was lost."""
    found: list[bool] = []
    close = Engine.close

    def closing(engine: Engine, *, lost: bool = False) -> None:
        found.append(lost)
        close(engine, lost=lost)

    monkeypatch.setattr(Engine, "close", closing)
    return found


def breaking(monkeypatch: pytest.MonkeyPatch, number: int, error: BaseException) -> None:
    """Let the contexts of one cell break with an error once they are there."""
    calls = itertools.count(1)

    def filling(engine: Engine, prompts: list[list[int]], tokens: int) -> list[str]:
        names = fill(engine, prompts, tokens)
        if next(calls) == number:
            raise error
        return names

    monkeypatch.setattr("pw.evaluation.bench.matrix.fill", filling)


def names_of(found: dict[str, Any], *, measured: bool) -> list[tuple[str, int]]:
    cells = [cell for cell in found["cells"] if ("left_out" not in cell) is measured]
    return [(cell["policy"], cell["batch"]) for cell in cells]


def test_an_interrupted_run_keeps_what_it_has(
    folder: Path, closed: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    breaking(monkeypatch, 2, KeyboardInterrupt())
    found = run_matrix(folder, CONFIG, TWO)
    assert found["interrupted"] is True
    assert [(cell["policy"], cell["batch"]) for cell in found["cells"]] == [("static:3", 1)]
    assert closed == [False]
    assert "| static:3 | 1 | 48 |" in report(found)


def test_an_interrupt_while_an_engine_ends_keeps_the_cells(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(engine: Engine) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pw.evaluation.bench.faults.end", end)
    breaking(monkeypatch, 2, KeyboardInterrupt())
    found = run_matrix(folder, CONFIG, TWO)
    assert found["interrupted"] is True
    assert names_of(found, measured=True) == [("static:3", 1)]


@pytest.mark.parametrize(
    "error", [ValueError("odd\nmore"), torch.OutOfMemoryError("CUDA out of memory")]
)
def test_a_cell_that_breaks_is_left_out_and_the_rest_is_measured(
    folder: Path, closed: list[bool], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    breaking(monkeypatch, 1, error)
    found = run_matrix(folder, CONFIG, TWO)
    assert names_of(found, measured=True) == [("static:3", 4), ("dense", 1), ("dense", 4)]
    text = str(error).partition("\n")[0]
    assert found["cells"][0]["left_out"] == f"{type(error).__name__}: {text}"
    assert (found["interrupted"], "failed" in found) == (False, False)
    assert closed == [False, False]


def gone(engine: Engine, name: str) -> None:
    engine.abort(name)


def spoilt(engine: Engine, name: str) -> None:
    parts = engine._parts
    pages = parts.kv.pages_of(engine._sequences[name].kv)
    parts.arena.as_dtype(parts.skeleton.dtype)[pages] = math.nan


@pytest.mark.parametrize(
    ("end", "reason"),
    [(gone, "3 of 4 sequences got a token in a step"), (spoilt, "a request of the benchmark fail")],
)
def test_a_cell_is_left_out_where_a_sequence_does_not_last(
    folder: Path, monkeypatch: pytest.MonkeyPatch, end: Callable[[Engine, str], None], reason: str
) -> None:
    """Steps of those that are left would be taken for steps of all."""

    def filling(engine: Engine, prompts: list[list[int]], tokens: int) -> list[str]:
        names = fill(engine, prompts, tokens)
        if len(names) == 4:
            end(engine, names[1])
        return names

    monkeypatch.setattr("pw.evaluation.bench.matrix.fill", filling)
    found = run_matrix(folder, CONFIG, TWO)
    assert names_of(found, measured=True) == [("static:3", 1), ("dense", 1)]
    assert {reason in cell["left_out"] for cell in found["cells"] if cell["batch"] == 4} == {True}


@pytest.mark.parametrize("error", [FAULT, torch.AcceleratorError("gone"), EngineLostError("gone")])
def test_a_lost_device_ends_the_run_and_the_cells_are_kept(
    folder: Path, closed: list[bool], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    breaking(monkeypatch, 2, error)
    found = run_matrix(folder, CONFIG, TWO)
    assert names_of(found, measured=True) == [("static:3", 1)]
    assert names_of(found, measured=False) == [("static:3", 4)]
    assert found["failed"] == found["cells"][1]["left_out"] == f"{type(error).__name__}: {error}"
    assert closed == [True]


def test_a_lost_device_is_raised_where_nothing_was_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaking(monkeypatch, 1, FAULT)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run_matrix(folder, CONFIG, TWO)


def test_an_engine_that_gets_no_memory_is_left_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens = Engine.from_artifact

    def opening(path: Path, config: EngineConfig) -> Engine:
        if config.policy.kind == "static":
            raise torch.OutOfMemoryError("no room")
        return opens(path, config)

    monkeypatch.setattr(Engine, "from_artifact", opening)
    found = run_matrix(folder, CONFIG, TWO)
    assert found["cells"][0] == {
        "policy": "static:3",
        "left_out": "OutOfMemoryError: no room",
        "hint": "lower --gpu-memory-utilization or --memory-budget",
    }
    assert names_of({"cells": found["cells"][1:]}, measured=True) == [("dense", 1), ("dense", 4)]


@pytest.mark.parametrize("error", [PwError("no room"), ValueError("no room")])
def test_widths_are_held_only_of_cells_that_were_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    breaking(monkeypatch, 2, error)
    policies = ("adaptive:4", "adaptive:3", "adaptive:2", "held:3")
    found = run_matrix(folder, CONFIG, replace(SMALL, policies=policies, batches=(1,)))
    assert names_of(found, measured=True) == [("adaptive:4", 1), ("adaptive:2", 1)]
    left_out = {cell["policy"]: cell.get("left_out") for cell in found["cells"]}
    assert str(left_out["adaptive:3"]).endswith("no room")
    assert left_out["held:3"] == "no cell of adaptive:3 was measured"
