"""`make quality` does not pass artifacts of other settings off as those that were asked for."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    """What `make quality` takes, with commands that do nothing."""
    commands, data = tmp_path / "venv" / "bin", tmp_path / "data"
    commands.mkdir(parents=True)
    data.mkdir()
    (data / "calibration.jsonl").write_text('{"source": "gut", "text": "a"}\n')
    for name in ("pw", "python"):
        (commands / name).write_text("#!/bin/sh\n")
        (commands / name).chmod(0o755)
    (tmp_path / "venv" / ".installed").touch()
    return [f"VENV={tmp_path / 'venv'}", "MODEL=model", f"DATA={data}"]


def quality(*given: str) -> subprocess.CompletedProcess[str]:
    # an outer `make test` hands its own flags and variables down
    outer = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES")
    clean = {name: value for name, value in os.environ.items() if name not in outer}
    return subprocess.run(
        ["make", "quality", *given],
        cwd=ROOT,
        env=clean,
        capture_output=True,
        text=True,
        check=False,
    )


def test_quality_goes_on_with_the_settings_of_its_first_run_alone(
    tmp_path: Path, given: list[str]
) -> None:
    folder = tmp_path / "q"
    first = quality(*given, f"Q={folder}")
    assert first.returncode == 0, first.stderr
    settings = (folder / "settings").read_text()
    assert "MODEL = model\n" in settings
    assert "STEPS = 240\n" in settings
    assert (folder / "results.done").exists()
    again = quality(*given, f"Q={folder}")
    assert again.returncode == 0, again.stderr
    for other in ("STEPS=3", "SAMPLES=--nsamples 40 --seqlen 256", "MODEL=another"):
        refused = quality(*given, f"Q={folder}", other)
        assert refused.returncode == 2
        error = refused.stderr.splitlines()[0]
        assert error.startswith(f"error: `{folder}` holds a run of other settings")
        assert other.replace("=", " = ", 1) in error
        assert "give Q=another-folder or remove it" in error
        assert (folder / "settings").read_text() == settings
    assert quality(*given, f"Q={tmp_path / 'other'}", "STEPS=3").returncode == 0


def test_quality_does_not_trust_what_has_no_settings(tmp_path: Path, given: list[str]) -> None:
    folder = tmp_path / "q"
    folder.mkdir()
    (folder / "own.done").touch()
    refused = quality(*given, f"Q={folder}")
    assert refused.returncode == 2
    assert "holds a run of other settings" in refused.stderr
