"""The studies end to end on a random model: every table comes out, within its bytes."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pw.evaluation.lab import online, room, running
from pw.evaluation.lab.__main__ import main
from pw.evaluation.lab.studies import (
    STUDIES,
    ablation,
    bf16_equal,
    codebooks,
    dense_bits,
    equal_bytes,
    pages,
    parts,
)
from pw_pipelines import residuals, trace
from support.engines import SAMPLES, make_artifact
from support.offline import QUIET

SOURCES = ("gut", "code", "factbook")
TASKS = ("kv_retrieval_512", "tracking", "sequence", "comparison")
BUDGET = 3.0  # mean bits


def words(seed: int, count: int) -> str:
    """Text of no meaning."""
    rng = np.random.default_rng(seed)
    return " ".join("".join(map(chr, rng.integers(97, 123, 5))) for _ in range(count))


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What every study is given: a random model and texts of the kinds that it looks for."""
    folder: Path = tmp_path_factory.mktemp("studies")
    make_artifact("qwen2_moe", folder, num_attention_heads=2)
    prompts = replace(SAMPLES, nsamples=32)
    trace.run(folder / "model.pw", prompts, QUIET, model=str(folder / "checkpoint"))
    residuals.run(folder / "model.pw", QUIET)
    for name in ("calibration", "heldout"):
        rows = [{"source": s, "text": words(i, 1500)} for i, s in enumerate(SOURCES)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "tasks").mkdir()
    for number, task in enumerate(TASKS):
        item = {"prompt": words(number, 300), "choices": [" a", " b"], "answer": 1}
        (folder / "tasks" / f"{task}.jsonl").write_text("\n".join([json.dumps(item)] * 5))
    model = str(folder / "model.pw")
    return [
        *("--artifact", model, "--apl", model, "--narrow", model),
        *("--checkpoint", str(folder / "checkpoint")),
        *("--calibration", str(folder / "calibration.jsonl")),
        *("--heldout", str(folder / "heldout.jsonl"), "--other", str(folder / "heldout.jsonl")),
        *("--tasks", str(folder / "tasks"), "--memory", str(folder / "memory")),
        *("--windows", "2", "--other-windows", "1", "--out", str(folder / "results")),
    ]


def measured(options: list[str], study: str) -> dict[str, Any]:
    """Run a study; what it wrote."""
    assert main(["run", study, *options]) == 0
    found: dict[str, Any] = json.loads((Path(options[-1]) / f"{study}.json").read_text())
    assert len(STUDIES[study].tables(found).splitlines()) > 2
    return found


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Those that were not out of reach."""
    return [row for row in found["rows"] if "failed" not in row]


@pytest.fixture(autouse=True)
def few_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """One budget, few short windows, and shares that a model of such short rows can meet."""
    monkeypatch.setattr(room, "WINDOW", 256)
    monkeypatch.setattr(room, "CALIBRATION_WINDOW", 128)
    monkeypatch.setattr(ablation, "LENGTHS", dict.fromkeys(ablation.LENGTHS, 128))
    monkeypatch.setattr(online, "WINDOWS", 1)
    for module in (ablation, codebooks, equal_bytes):
        monkeypatch.setattr(module, "BUDGETS", (BUDGET,))
    monkeypatch.setattr(bf16_equal, "TARGET", -3.0)
    for module in (pages, parts):
        monkeypatch.setattr(module, "SHARE", 4.0)


@pytest.mark.parametrize("study", ["codebooks", "bf16-equal", "pages"])
def test_intervals_hold_their_means(
    options: list[str], study: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = rows(measured(options, study))
    assert f"## {study}" in capsys.readouterr().out
    assert all(row["nll"]["low"] <= row["nll"]["mean"] <= row["nll"]["high"] for row in found)


def test_opponents_have_the_same_bytes_and_the_product_is_no_distance_from_itself(
    options: list[str],
) -> None:
    found = rows(measured(options, "equal-bytes"))
    most = max(row["bytes"] for row in found)
    assert min(row["bytes"] for row in found) > 0.93 * most
    (product,) = [row for row in found if row["method"] == equal_bytes.PRODUCT]
    assert product["product_over_it"]["mean"] == 0
    assert product["other"]["product_over_it"]["mean"] == 0


def test_layers_and_widths_add_up_to_the_whole(options: list[str]) -> None:
    found = {row["part"]: row for row in rows(measured(options, "parts"))}
    whole = found.pop("all")
    assert 0 < whole["planes"] < whole["bytes"]
    for kind in ("layer", "bits"):
        some = [row for name, row in found.items() if kind in name]
        assert len(some) > 1
        for key in ("blocks", "bytes", "planes", "predicted"):
            assert sum(row[key] for row in some) == pytest.approx(whole[key])
    assert found["2 bits"]["bits"] in (0.0, 2.0)


def test_studies_run_side_by_side_and_one_that_fails_stops_no_other(
    options: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = [*options[:-1], str(tmp_path / "results"), "--jobs", "2", "--device", "cpu"]
    without = given.index("--narrow")
    del given[without : without + 2]
    assert main(["run", "shift", "dense-bits", *given]) == 1
    assert "shift: error: this study needs an artifact calibrated on prose" in (
        capsys.readouterr().err
    )
    found = json.loads((tmp_path / "results" / "dense-bits.json").read_text())
    assert found["made"]["device"] == "cpu"
    assert found["made"]["hardware"]["threads"] == 1
    assert not (tmp_path / "results" / "shift.json").exists()


def test_studies_whose_process_was_killed_end_in_one_line_each(
    options: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [*options[:-1], str(Path(options[-1]) / "killed"), "--jobs", "2"]
    monkeypatch.setattr(running, "_study", killed)
    assert main(["run", "shift", "dense-bits", *given]) == 1
    told = capsys.readouterr().err
    assert "Traceback" not in told
    for study in ("shift", "dense-bits"):
        assert f"{study}: error: a process of this run was killed" in told
    assert told.count("hint: memory may have run out") == 2


def killed(*_: object) -> None:
    """What a study is when the system takes its process away."""
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("jobs", ["0", "-1", "many"])
def test_no_jobs_are_refused(
    options: list[str], capsys: pytest.CaptureFixture[str], jobs: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "shift", *options, "--jobs", jobs])
    assert ended.value.code == 2
    assert f"--jobs: must be a whole number of at least 1: `{jobs}`" in capsys.readouterr().err


def test_every_ablation_is_scored(options: list[str]) -> None:
    found = rows(measured(options, "ablation"))
    assert len({row["variant"] for row in found}) > 9
    assert found[0]["kl_over_full"]["mean"] == 0
    assert all(row["kl"]["mean"] > 0 for row in found)


def test_dense_weights_of_fewer_bits_lose_more_and_come_back(options: list[str]) -> None:
    found = rows(measured(options, "dense-bits"))
    assert [row["bits"] for row in found] == list(dense_bits.WIDTHS)
    losses = [row["kl"]["mean"] for row in found]
    assert 0 <= losses[0] < losses[-1]
    assert (
        found[0]["bytes_share"] == 1
    )  # rows of 64: a table of 256 entries is larger than they are
    assert found[-1]["bytes_share"] < 1
    again = rows(measured(options, "dense-bits"))
    assert again == found


def test_rows_are_rounded_to_their_own_means() -> None:
    import torch

    weight = torch.randn(5, 300)
    for bits in (2, 4):
        values = dense_bits.round_rows(weight, bits)
        assert all(len(row.unique()) <= 1 << bits for row in values)
        uniform = torch.linspace(-3, 3, 1 << bits)
        nearest = uniform[(weight[..., None] - uniform).abs().argmin(-1)]
        assert (values - weight).square().mean() < (nearest - weight).square().mean()
    assert torch.equal(dense_bits.round_rows(weight, 9), weight)
