"""Settings that must hold before any import: Triton interprets, torch keeps to two threads."""

import os

# Read once, at the first import of triton by anyone; GPU tests run with TRITON_INTERPRET=0.
os.environ.setdefault("TRITON_INTERPRET", "1")
# Torch's threads wait asleep, not spinning: ten times faster where other jobs share the cores.
os.environ.setdefault("GOMP_SPINCOUNT", "0")

from pathlib import Path
from typing import Any

import pytest
import torch

from support.profiles import load_profile

torch.set_num_threads(2)
load_profile(os.environ)


@pytest.fixture(scope="session", autouse=True)
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of a test run have in common."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "shared"
    folder.mkdir(exist_ok=True)
    os.environ["PW_TESTS_SHARED"] = str(folder)
    return folder


@pytest.fixture(scope="session")
def tiny(shared: Path) -> Path:
    """The bundled model, quantized with little text; without further tables. Not to be changed."""
    from support.tiny import make_tiny

    return make_tiny(shared)


@pytest.fixture(scope="session")
def measured(tiny: Path, shared: Path) -> tuple[Path, Any]:
    """A copy of `tiny` with sensitivities and a trace, and the report of the former."""
    from support.tiny import measure

    return measure(tiny, shared)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Give every test the same random numbers, whatever ran before it."""
    torch.manual_seed(0)
