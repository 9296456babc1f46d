import pytest

from pw.models.checkpoint import Checkpoint
from pw.models.resolve import resolve_model
from pw_pipelines.observation import ObservedModel


@pytest.fixture(scope="session")
def model() -> ObservedModel:
    """The bundled model, dense."""
    return ObservedModel(Checkpoint.open(resolve_model("tiny")), "cpu")
