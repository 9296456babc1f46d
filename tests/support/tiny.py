"""The bundled model's artifact, made once in a test run for all its processes."""

from __future__ import annotations

import shutil
from pathlib import Path

from filelock import FileLock

from pw.config import QuantizeConfig
from pw_pipelines import quantize, sensitivity, trace
from pw_pipelines.sensitivity import SensitivityReport
from support.offline import QUIET, TINY_TEXT


def make_tiny(folder: Path) -> Path:
    """Quantized with little text, at 2 to 4 bits."""
    path = folder / "tiny.pw"
    with FileLock(folder / "tiny.lock"):
        if not path.exists():  # it appears by one rename
            config = QuantizeConfig(max_bits=4, calibration=TINY_TEXT)
            quantize.run("tiny", path, config, QUIET)
    return path


def measure(tiny: Path, folder: Path) -> tuple[Path, SensitivityReport]:
    """A copy with sensitivities and a trace, and the report of the former."""
    path = folder / "measured" / "tiny.pw"
    with FileLock(folder / "measured.lock"):
        if not path.exists():
            shutil.copytree(tiny, path)
        report = sensitivity.run(path, TINY_TEXT, QUIET)  # of the first process that comes
        trace.run(path, TINY_TEXT, QUIET)
    return path, report
