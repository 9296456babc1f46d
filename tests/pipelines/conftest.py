import shutil
from pathlib import Path

import pytest

from pw.config import QuantizeConfig
from pw.models.checkpoint import Checkpoint
from pw.models.resolve import resolve_model
from pw_pipelines import quantize, sensitivity, trace
from pw_pipelines.observation import ObservedModel
from pw_pipelines.sensitivity import SensitivityReport
from support.offline import QUIET, TINY_TEXT


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, quantized with little text; without further tables."""
    path = tmp_path_factory.mktemp("quantized") / "tiny.pw"
    quantize.run("tiny", path, QuantizeConfig(calibration=TINY_TEXT), QUIET)
    return path


@pytest.fixture(scope="session")
def measured(
    tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, SensitivityReport]:
    """A copy of `tiny` with sensitivities and a trace, and the report of the former."""
    path = tmp_path_factory.mktemp("measured") / "tiny.pw"
    shutil.copytree(tiny, path)
    report = sensitivity.run(path, TINY_TEXT, QUIET)
    trace.run(path, TINY_TEXT, QUIET)
    return path, report


@pytest.fixture(scope="session")
def model() -> ObservedModel:
    """The bundled model, dense."""
    return ObservedModel(Checkpoint.open(resolve_model("tiny")), "cpu")
