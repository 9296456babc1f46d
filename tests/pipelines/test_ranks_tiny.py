"""Two processes calibrate the bundled model, as one does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pw.store.artifact import Artifact
from pw.store.verify import verify
from support.offline import TINY_TEXT

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(400)
def test_two_ranks_calibrate_the_bundled_model(measured: tuple[Path, Any], tmp_path: Path) -> None:
    out = tmp_path / "tiny.pw"
    paths = os.pathsep.join(str(ROOT / name) for name in (".", "kernels", "pipelines"))
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            "-m", "pw", "calibrate", "tiny", "-o", str(out), "--max-bits", "4", "--device", "cpu",
            "--nsamples", str(TINY_TEXT.nsamples), "--seqlen", str(TINY_TEXT.seqlen), "-q",
        ],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    one, two = Artifact.open(measured[0]), Artifact.open(out)
    assert verify(out) == []
    for stage in ("moments", "sensitivity", "routing"):
        first, second = one.table(stage).arrays, two.table(stage).arrays
        assert first.keys() == second.keys()
        for name, array in first.items():
            np.testing.assert_allclose(second[name], array, rtol=2e-5, atol=1e-12, err_msg=name)
    assert (measured[0] / "dense.safetensors").read_bytes() == (
        out / "dense.safetensors"
    ).read_bytes()
