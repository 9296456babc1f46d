"""A long run keeps what it has when something breaks: engines end, records are shown."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from pw.engine import Engine
from pw.errors import EngineLostError, PwError
from pw.evaluation.bench.timing import end

_FREE_MEMORY = "lower --gpu-memory-utilization or --memory-budget"


@contextmanager
def undisturbed() -> Iterator[None]:
    """Another Ctrl-C does nothing."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def ended(engine: Engine) -> Iterator[None]:
    """End an engine, whatever happens with it; a lost device is left alone."""
    try:
        yield
    except BaseException as error:
        with suppress(Exception):  # the first error is the one to tell
            if is_lost(error):
                engine.close(lost=True)
            else:
                end(engine)
        raise
    end(engine)


def clear(engine: Engine) -> None:
    """Drop the requests of a cell that broke.

    Raises:
        Exception: The engine or its device is no longer whole.
    """
    for request in list(engine._sequences):
        engine.abort(request)
    engine.check_integrity()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def is_lost(error: BaseException) -> bool:
    """Whether an error is one of a device that nothing can be computed on any more.

    Libraries raise plain RuntimeErrors for CUDA's.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return False
    known = isinstance(error, torch.AcceleratorError | EngineLostError)
    text = str(error).upper()
    return known or (isinstance(error, RuntimeError) and ("CUDA" in text or "NCCL" in text))


def left_out(error: Exception) -> dict[str, str]:
    """What stands in place of figures: why there are none, and what helps where that is known."""
    lacks_memory = isinstance(error, torch.OutOfMemoryError)
    hint = error.hint if isinstance(error, PwError) else _FREE_MEMORY if lacks_memory else ""
    return {"left_out": message(error)} | ({"hint": hint} if hint else {})


def message(error: Exception) -> str:
    """An error in a line."""
    text = next(iter(str(error).splitlines()), "")
    return text if isinstance(error, PwError) else f"{type(error).__name__}: {text}".rstrip(": ")
