"""Runs `pw` in this process, as the console script does."""

from __future__ import annotations

import contextlib
import io
import logging
from pathlib import Path
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


TEXT_FLAGS = ("--nsamples", "40", "--seqlen", "16")  # of the stages of `Made`
SMALL = ("--memory-budget", "64MiB", "--max-num-batched-tokens", "32")


class Made(NamedTuple):
    """A checkpoint and what the offline commands made of it."""

    checkpoint: Path
    artifact: Path
    text: Path
    calibrated: Outcome
