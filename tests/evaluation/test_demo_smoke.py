"""The demo itself, on the bundled model, small: real processes, real HTTP, real pages."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pw.evaluation.demo.__main__ import run_demo
from pw.evaluation.demo.load import Wave
from pw.evaluation.demo.settings import DemoSettings

SETTINGS = DemoSettings(
    waves=(Wave("burst", 6, 2, 60, 40, 0.1),),
    room_share=0.25,
    sample_seconds=0.05,
    quiet_seconds=0.2,
    transfer_budget="16MiB",
    snapshots=4,
    chunks=8,
    chunk_tokens=256,
)


@pytest.mark.slow
@pytest.mark.timeout(300)  # it may have to make the artifact, and plays a wave of requests
def test_the_demo_passes_its_own_checks(measured: tuple[Path, Any], tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=120, soft_wrap=True, record=True)
    code = run_demo(SETTINGS, measured[0], tmp_path, console)
    text = console.export_text()
    assert code == 0, text
    results = json.loads((tmp_path / "results.json").read_text())
    assert all(check["passed"] for check in results["checks"])
    assert len(results["checks"]) == 9
    assert [score["policy"] for score in results["scores"]] == [
        *("dense", "static:2", "static:3", "static:4", "adaptive")
    ]
    assert len(list((tmp_path / "snapshots").iterdir())) == 4
    assert (tmp_path / "timeline.png").stat().st_size > 10_000
    assert "adaptive minus that" in text
