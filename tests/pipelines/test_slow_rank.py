"""Ranks wait for one that is slow, for as long as `pw_pipelines.ranks` says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SLOW_SECONDS = 2.0
RANK = """
import sys, time
from datetime import timedelta
import torch
from pw_pipelines import ranks

if sys.argv[1] != "as it is":
    ranks._WAIT = timedelta(seconds=float(sys.argv[1]))
group = ranks.Ranks.join()
for turn in range(2):  # at a layer's end, and at the end of all
    if group.rank == turn:
        time.sleep(float(sys.argv[2]))
    total = torch.tensor([1.0 + group.rank])
    group.add_up([total])
    assert total.item() == 3.0
group.leave()
"""


def two_ranks(folder: Path, wait: str) -> subprocess.Popen[str]:
    script = folder / "rank.py"
    script.write_text(RANK)
    paths = os.pathsep.join(str(ROOT / name) for name in (".", "kernels", "pipelines"))
    return subprocess.Popen(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            str(script), wait, str(SLOW_SECONDS),
        ],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


@pytest.mark.timeout(400)
def test_a_slow_rank_is_waited_for(tmp_path: Path) -> None:
    """What would end the wait is our own limit, a month, and not one of torch's."""
    runs = [two_ranks(tmp_path, wait) for wait in ("0.5", "as it is")]  # side by side
    told = [run.communicate(timeout=150)[1] for run in runs]
    assert runs[0].returncode != 0
    assert "imed out" in told[0]
    assert runs[1].returncode == 0, told[1]
