"""`pw serve tiny` as a process, for clients as users install them: `make test-clients`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TEMPLATE = Path(__file__).parent / "tools.jinja"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies here; warnings of other people's packages are theirs."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.clients)
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """Root of a server that runs until the session ends."""
    command = [
        sys.executable, "-m", "pw", "serve", "tiny", "--port", "0", "--quiet",
        "--memory-budget", "64MiB", "--max-num-seqs", "8", "--precision-policy", "static:4",
        "--chat-template", str(TEMPLATE),
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            line = next((line for line in process.stdout if " serves " in line), "")
            assert line, "the server did not start"
            yield line.split()[-1]
        finally:
            process.terminate()
            process.stdout.read()
        assert process.wait(60) == 0
