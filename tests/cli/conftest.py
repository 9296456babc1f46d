import pytest

from support.cli import TEXT_FLAGS, Made, run
from support.offline import random_checkpoint, write_text


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A random checkpoint, calibrated and with residual heads."""
    folder = tmp_path_factory.mktemp("flow")
    random_checkpoint(folder / "checkpoint", num_hidden_layers=1)
    text = write_text(folder / "text.txt", 8000)
    artifact = folder / "model.pw"
    flags = ("--dataset", str(text), *TEXT_FLAGS, "--max-bits", "4")
    calibrated = run("calibrate", str(folder / "checkpoint"), "-o", str(artifact), *flags)
    assert calibrated.code == 0, calibrated.err
    fitted = run("fit-residuals", str(artifact), "-q")
    assert (fitted.code, fitted.err) == (0, "")
    return Made(folder / "checkpoint", artifact, text, calibrated)
