"""The sample artifact, built once; tests that damage it get a copy."""

import shutil
from pathlib import Path

import pytest

from pw.store import Artifact
from support.store import Sample


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return Sample(tmp_path_factory.mktemp("sample"))


@pytest.fixture(scope="session")
def built(sample: Sample, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return sample.build(tmp_path_factory.mktemp("built") / "sample.pw")


@pytest.fixture
def copy(built: Artifact, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built.path, tmp_path / "sample.pw"))
