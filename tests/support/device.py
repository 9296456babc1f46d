"""What GPU tests ask of torch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_waits() -> Iterator[None]:
    """Any call of torch that waits for the device is an error, where it stands."""
    _set_mode("error")
    try:
        yield
    finally:
        _set_mode("default")


def _set_mode(mode: str) -> None:
    """Set torch's mode without its warning that the mode is a prototype."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)
