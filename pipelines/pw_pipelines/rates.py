"""How fast this machine multiplies: what estimates and floors rest on."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

_SIDE = 768


def seconds_per_operation(device: torch.device) -> float:
    """Of a float32 matrix product of some size; one multiplication and one addition are two."""
    a = torch.randn(_SIDE, _SIDE, device=device)
    return timed(lambda: a @ a) / (2 * _SIDE**3)


def timed(work: Callable[[], object]) -> float:
    """Seconds of the second call."""
    work()
    _wait()
    started = time.perf_counter()
    work()
    _wait()
    return time.perf_counter() - started


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
