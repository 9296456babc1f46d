"""`pw calibrate` may be killed at any moment of any stage: done again, it ends with equal bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import calibrate_crash
from support.offline import random_checkpoint, write_text


@pytest.mark.parametrize("instants", [1, pytest.param(240, marks=pytest.mark.figures)])
def test_killed_at_random_instants_it_ends_with_the_same_bytes(
    tmp_path: Path, instants: int
) -> None:
    random_checkpoint(tmp_path / "checkpoint", num_hidden_layers=2)
    text = write_text(tmp_path / "text.txt", 8000)
    done = subprocess.run(
        [
            sys.executable, calibrate_crash.__file__, str(tmp_path / "checkpoint"), str(text),
            str(tmp_path), str(instants), "0",
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0
    found = json.loads(done.stdout)
    print(found)
    assert found["same"] == instants, found
    assert found["killed"] >= instants / 2
