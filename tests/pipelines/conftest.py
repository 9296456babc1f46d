import os
import shutil
from pathlib import Path

import pytest
from filelock import FileLock

from pw.config import QuantizeConfig
from pw.models.checkpoint import Checkpoint
from pw.models.resolve import resolve_model
from pw_pipelines import quantize, sensitivity, trace
from pw_pipelines.observation import ObservedModel
from pw_pipelines.sensitivity import SensitivityReport
from support.offline import QUIET, TINY_TEXT


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of a test run have in common."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def tiny(shared: Path) -> Path:
    """The bundled model, quantized with little text; without further tables. Not to be changed."""
    path = shared / "tiny.pw"
    with FileLock(shared / "tiny.lock"):
        if not path.exists():  # it appears by one rename
            config = QuantizeConfig(max_bits=4, calibration=TINY_TEXT)
            quantize.run("tiny", path, config, QUIET)
    return path


@pytest.fixture(scope="session")
def measured(tiny: Path, shared: Path) -> tuple[Path, SensitivityReport]:
    """A copy of `tiny` with sensitivities and a trace, and the report of the former."""
    path = shared / "measured" / "tiny.pw"
    with FileLock(shared / "measured.lock"):
        if not path.exists():
            shutil.copytree(tiny, path)
        report = sensitivity.run(path, TINY_TEXT, QUIET)  # of the first process that comes
        trace.run(path, TINY_TEXT, QUIET)
    return path, report


@pytest.fixture(scope="session")
def model() -> ObservedModel:
    """The bundled model, dense."""
    return ObservedModel(Checkpoint.open(resolve_model("tiny")), "cpu")
