"""Several processes make the artifact that one makes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pw.blocks import MODULES
from pw.config import CalibrationConfig, QuantizeConfig
from pw.models.testing import make_checkpoint
from pw.store.artifact import Artifact
from pw_pipelines import quantize, sensitivity, trace
from pw_pipelines.ranks import ALONE, Ranks
from support.offline import QUIET, write_text, write_tokenizer

ROOT = Path(__file__).parents[2]
TABLES = ("moments", "sensitivity", "routing")
SAMPLES, LENGTH = 24, 128  # two batches


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CalibrationConfig]:
    """A small random model and a text."""
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint("qwen2_moe", folder, vocab_size=259)
    write_tokenizer(folder)
    text = write_text(folder / "text.txt", 30_000)
    return folder, CalibrationConfig(str(text), SAMPLES, LENGTH)


@pytest.fixture(scope="module")
def alone(
    checkpoint: tuple[Path, CalibrationConfig], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """What one process makes, with as many threads as each of the ranks has."""
    out = tmp_path_factory.mktemp("alone") / "a.pw"
    model, config = checkpoint
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        quantize.run(str(model), out, QuantizeConfig(calibration=config), QUIET, device="cpu")
        sensitivity.run(out, config, QUIET, device="cpu")
        trace.run(out, config, QUIET, device="cpu")
    finally:
        torch.set_num_threads(threads)
    return out


def two_ranks(checkpoint: tuple[Path, CalibrationConfig], out: Path) -> subprocess.Popen[Any]:
    model, config = checkpoint
    paths = os.pathsep.join(str(ROOT / name) for name in (".", "kernels", "pipelines"))
    return subprocess.Popen(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            "-m", "pw", "calibrate", str(model), "-o", str(out), "--dataset", config.dataset,
            "--nsamples", str(SAMPLES), "--seqlen", str(LENGTH), "--device", "cpu", "-q",
        ],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


def assert_same_tables(one: Artifact, other: Artifact) -> None:
    for stage in TABLES:
        first, second = one.table(stage).arrays, other.table(stage).arrays
        assert first.keys() == second.keys()
        for name, array in first.items():
            if array.dtype.kind in "iu":
                np.testing.assert_array_equal(array, second[name], err_msg=name)
            else:
                np.testing.assert_allclose(array, second[name], rtol=2e-5, atol=1e-12, err_msg=name)


def payload(path: Path, layer: int, module: str) -> dict[str, bytes]:
    """Files of the planes and LUTs of one (layer, module)."""
    return {
        str(file.relative_to(path)): file.read_bytes()
        for group in ("planes.zarr", "luts.zarr")
        for file in sorted((path / group).glob(f"{layer}.{module}*/**/*"))
        if file.is_file()
    }


@pytest.mark.timeout(400)  # two runs of three processes each: half a minute on two free cores
def test_two_ranks_make_what_one_makes_even_if_one_is_killed_on_the_way(
    checkpoint: tuple[Path, CalibrationConfig], alone: Path, tmp_path: Path
) -> None:
    out = tmp_path / "a.pw"
    process = two_ranks(checkpoint, out)
    kill_a_worker(process, tmp_path / "a.pw.partial")
    process.communicate(timeout=150)
    assert process.returncode != 0
    assert not out.exists()
    process = two_ranks(checkpoint, out)
    _, errors = process.communicate(timeout=150)
    assert process.returncode == 0, errors
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.pw"]  # no lock, no partial, no work
    one, two = Artifact.open(alone), Artifact.open(out)
    assert_same_tables(one, two)
    assert (alone / "dense.safetensors").read_bytes() == (out / "dense.safetensors").read_bytes()
    equal = 0
    for slot, layer in enumerate(one.geometry.layers):
        for module in MODULES:
            first, second = (a.table("moments").arrays[module][slot] for a in (one, two))
            if (first == second).all():  # rounding may tell sums in another order apart
                equal += 1
                assert payload(alone, layer, module)
                assert payload(alone, layer, module) == payload(out, layer, module)
    assert equal > 0


def kill_a_worker(process: subprocess.Popen[Any], partial: Path) -> None:
    """Kill the second rank once blocks are being written."""
    deadline = time.monotonic() + 100
    while not any((partial / ".build" / "blocks").glob("*.json")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.002)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)


def test_jobs_are_packed_evenly_and_done_once() -> None:
    costs = [8.0, 1.0, 1.0, 1.0, 1.0, 4.0, 3.0, 2.0, 2.0]
    shares = [Ranks(rank, 3).own(costs) for rank in range(3)]
    assert sorted(job for share in shares for job in share) == list(range(len(costs)))
    loads = [sum(costs[job] for job in share) for share in shares]
    assert max(loads) - min(loads) <= 1


def test_parts_are_neighbours_in_order() -> None:
    items = list(range(7))
    parts = [list(Ranks(rank, 4).part(items)) for rank in range(4)]
    assert [item for part in parts for item in part] == items
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_alone_changes_nothing() -> None:
    tensor = torch.tensor([1.0, 2.0])
    ALONE.add_up([tensor])
    assert tensor.tolist() == [1.0, 2.0]
    assert ALONE.least(3) == 3
    assert ALONE.own([1.0, 2.0]) == {0, 1}
    assert ALONE.part([1, 2, 3]) == [1, 2, 3]
