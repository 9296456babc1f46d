"""The script that makes the GPU's records types commands that there are, and records are listed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from support.cli import run

ROOT = Path(__file__).parents[2]
NOTE = f'() {{ {sys.executable} -c "import json, sys; print(json.dumps(sys.argv[1:]))" "$@"; }}'


def commands(folder: Path, *groups: str) -> list[list[str]]:
    """What would be typed behind `pw`."""
    names = {"RESULTS": str(folder), "NAME": "here", "BASH_FUNC_pw%%": NOTE}
    done = subprocess.run(
        ["bash", str(ROOT / "benchmarks" / "gpu.sh"), *groups],
        env=os.environ | names,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_command_of_the_gpus_records_is_one_and_every_record_is_listed(
    tmp_path: Path,
) -> None:
    typed = commands(tmp_path, "matrix models kernels squeeze cycles offline")
    listed = (ROOT / "benchmarks" / "README.md").read_text("utf-8")
    assert len(typed) == 11
    for command in typed:
        done = run(*command, "--help")
        assert done.code == 0, done.err
        record = command[command.index("--result-filename") + 1].removesuffix("-here.json")
        assert f"`{record.removesuffix('-qwen1.5-moe')}-" in listed


def test_a_group_that_there_is_not_is_named_before_anything_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "benchmarks" / "gpu.sh"), "models", "--help"],
        env=os.environ | {"RESULTS": str(tmp_path / "new"), "BASH_FUNC_pw%%": NOTE},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "`--help`" in done.stderr
    assert "models kernels" in done.stderr
    assert not (tmp_path / "new").exists()
