"""Runs `pw` in this process, as the console script does."""

from __future__ import annotations

import contextlib
import io
import logging
from typing import NamedTuple

import pytest

from pw.cli import main


class Outcome(NamedTuple):
    """What a user gets."""

    code: int
    out: str
    err: str


def run(*arguments: str) -> Outcome:
    """Run one command; logging is put back as it was."""
    root = logging.getLogger()
    loggers = [root, *map(logging.getLogger, ("pw", "pw_pipelines", "pw_kernels"))]
    levels, handlers = [logger.level for logger in loggers], root.handlers[:]
    out, err = io.StringIO(), io.StringIO()
    try:
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            pytest.raises(SystemExit) as stop,
        ):
            main(arguments)
    finally:
        root.handlers[:] = handlers
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
    return Outcome(int(stop.value.code or 0), out.getvalue(), err.getvalue())
