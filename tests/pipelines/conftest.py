from pathlib import Path

import pytest
from support.offline import QUIET, TINY_TEXT

from pw.config import QuantizeConfig
from pw_pipelines import quantize


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, quantized with little text."""
    path = tmp_path_factory.mktemp("pipelines") / "tiny.pw"
    quantize.run("tiny", path, QuantizeConfig(calibration=TINY_TEXT), QUIET)
    return path
