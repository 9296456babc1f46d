"""Time and memory of the offline stages at the size of a real model, from few of its layers.

Writes random checkpoints in the model's layout with two numbers of layers, runs all stages on each
in a process of its own, and says of every stage its seconds and the peak of memory: of the host,
once what nothing but the process itself frees (anonymous) and once all that is resident, and of the
GPU. Memory must be the same for both; seconds and bytes are drawn on to the whole model.

    python -m pw_pipelines.scale pipelines/recipes/configs/qwen1.5-moe-a2.7b.json --device cuda
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pw.config import CalibrationConfig, QuantizeConfig
from pw_pipelines import quantize, residuals, sensitivity, trace
from pw_pipelines.progress import Progress, Style
from pw_pipelines.synthetic import fewer_layers, write, write_text

_SECONDS_BETWEEN_LOOKS = 0.02


@dataclass(frozen=True)
class StageCost:
    """What one stage took."""

    stage: str
    seconds: float
    anonymous_bytes: int  # peak of RssAnon, looked at fifty times a second
    resident_bytes: int  # the same of all resident pages
    gpu_bytes: int  # peak of what torch held; 0 on a CPU


class _Watch:
    """Follows the memory of this process while it is entered (Linux).

    A kernel that does not tell anonymous pages from others is asked for all resident ones.
    """

    def __enter__(self) -> _Watch:
        self.anonymous, self.resident, self._stop = 0, 0, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        self._started = time.perf_counter()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._started
        self._stop.set()
        self._thread.join()
        self.gpu = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0

    def _look(self) -> None:
        while not self._stop.wait(_SECONDS_BETWEEN_LOOKS):
            lines = Path("/proc/self/status").read_text().splitlines()
            found = dict(line.split(":", 1) for line in lines)
            resident = int(found["VmRSS"].split()[0]) * 1024
            anonymous = int(found["RssAnon"].split()[0]) * 1024 if "RssAnon" in found else resident
            self.anonymous = max(self.anonymous, anonymous)
            self.resident = max(self.resident, resident)


def measure(model: Path, out: Path, config: QuantizeConfig, device: str) -> list[StageCost]:
    """Run all stages on a checkpoint, one after the other."""
    progress, text = Progress(Style.PLAIN), config.calibration
    how: dict[str, Any] = {"model": str(model), "device": device}
    stages: dict[str, Callable[[], object]] = {
        "quantize": lambda: quantize.run(str(model), out, config, progress, device=device),
        "sensitivity": lambda: sensitivity.run(out, text, progress, **how),
        "trace": lambda: trace.run(out, text, progress, **how),
        "fit-residuals": lambda: residuals.run(out, progress),
    }
    found = []
    for name, stage in stages.items():
        with _Watch() as watch:
            stage()
        found.append(StageCost(name, watch.seconds, watch.anonymous, watch.resident, watch.gpu))
    return found


def extrapolated(layers: tuple[int, int], values: tuple[float, float], whole: int) -> float:
    """Value for `whole` layers on the line through those of two numbers of layers."""
    slope = (values[1] - values[0]) / (layers[1] - layers[0])
    return values[0] + slope * (whole - layers[0])


def report(
    layers: tuple[int, int],
    costs: tuple[list[StageCost], list[StageCost]],
    disk: tuple[int, int],
    whole: int,
) -> str:
    """A table of both runs and what it means for the whole model."""
    lines = [f"{'stage':14}" + "".join(
        f"{f'{n} layers: s':>14}{'anon GB':>9}{'RSS GB':>9}{'GPU GB':>9}" for n in layers
    ) + f"{f'{whole} layers: s':>16}"]  # fmt: skip
    total = 0.0
    for few, more in zip(*costs, strict=True):
        seconds = extrapolated(layers, (few.seconds, more.seconds), whole)
        total += seconds
        lines.append(f"{few.stage:14}" + "".join(
            f"{c.seconds:14.1f}{c.anonymous_bytes / 1e9:9.2f}{c.resident_bytes / 1e9:9.2f}"
            f"{c.gpu_bytes / 1e9:9.2f}" for c in (few, more)
        ) + f"{seconds:16.1f}")  # fmt: skip
    size = extrapolated(layers, (float(disk[0]), float(disk[1])), whole)
    lines.append(f"{whole} layers: {total:.0f} s in all, artifact {size / 1e9:.1f} GB")
    return "\n".join(lines)


def _run_once(settings: dict[str, Any], layers: int, given: argparse.Namespace) -> dict[str, Any]:
    """Write a checkpoint and measure it in another process."""
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        write(fewer_layers(settings, layers), folder / "model", device=given.device)
        command = [
            sys.executable, "-m", "pw_pipelines.scale", "--run", str(folder),
            "--device", given.device, "--codebook", given.codebook, "--max-bits",
            str(given.max_bits), "--nsamples", str(given.nsamples), "--seqlen", str(given.seqlen),
        ]  # fmt: skip
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        return dict(json.loads(done.stdout))


def _child(given: argparse.Namespace) -> None:
    out = given.run / "model.pw"
    write_text(given.run / "text.jsonl", given.nsamples, given.seqlen)
    text = CalibrationConfig(str(given.run / "text.jsonl"), given.nsamples, given.seqlen)
    config = QuantizeConfig(max_bits=given.max_bits, calibration=text, codebook=given.codebook)
    costs = measure(given.run / "model", out, config, given.device)
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    print(json.dumps({"costs": [asdict(cost) for cost in costs], "disk": size}))


def main() -> None:
    """Measure what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("config", type=Path, nargs="?", help="a config.json")
    parser.add_argument("--layers", type=int, nargs=2, default=(2, 3), metavar="N")
    parser.add_argument("--experts", type=int, help="fewer than the model has in a layer")
    parser.add_argument("--folder", type=Path, help="of temporary files (default: the system's)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--codebook", default="joint", choices=("joint", "kmeans"))
    parser.add_argument("--max-bits", type=int, default=8)
    parser.add_argument("--nsamples", type=int, default=128)
    parser.add_argument("--seqlen", type=int, default=2048)
    parser.add_argument("--json", type=Path, help="file for both runs' figures")
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run is not None:
        _child(given)
        return
    settings = json.loads(given.config.read_text("utf-8"))
    if given.experts is not None:
        key = next(
            k for k in ("num_experts", "num_local_experts", "n_routed_experts") if k in settings
        )
        settings[key] = given.experts
    runs = [_run_once(settings, layers, given) for layers in given.layers]
    costs = tuple([StageCost(**cost) for cost in run["costs"]] for run in runs)
    disk = (runs[0]["disk"], runs[1]["disk"])
    layers = (given.layers[0], given.layers[1])
    if given.json is not None:
        named = [run | {"layers": n} for run, n in zip(runs, layers, strict=True)]
        given.json.write_text(json.dumps(named))
    print(report(layers, (costs[0], costs[1]), disk, settings["num_hidden_layers"]))


if __name__ == "__main__":
    main()
