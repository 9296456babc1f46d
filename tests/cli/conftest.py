from collections.abc import Callable
from typing import NamedTuple

import pytest

from pw.cli import main


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `pw` in this process, as the console script does."""

    def run(*arguments: str) -> Outcome:
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        out, err = capsys.readouterr()
        return Outcome(int(stop.value.code or 0), out, err)

    return run
