import pytest

from pw.config import QuantizeConfig
from pw.models.checkpoint import Checkpoint
from pw.models.resolve import resolve_model
from pw_pipelines import quantize
from pw_pipelines.observation import ObservedModel
from support.offline import QUIET, Small, calibration, random_checkpoint


@pytest.fixture(scope="session")
def model() -> ObservedModel:
    """The bundled model, dense."""
    return ObservedModel(Checkpoint.open(resolve_model("tiny")), "cpu")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """A random checkpoint, quantized."""
    folder = tmp_path_factory.mktemp("small")
    random_checkpoint(folder / "model")
    made = Small(folder, QuantizeConfig(max_bits=4, calibration=calibration(folder)))
    quantize.run(made.model, made.artifact, made.config, QUIET)
    return made
