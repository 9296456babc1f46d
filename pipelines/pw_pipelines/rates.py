"""How fast this machine multiplies: what estimates and floors rest on."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from pw_pipelines.precision import tensor_cores

_SIDE = {"cpu": 768, "cuda": 8192}  # of a matrix that is large there


def seconds_per_operation(device: torch.device) -> float:
    """Of a large float32 matrix product as the stages make it; one multiplication and one addition
    are two.
    """
    side = _SIDE[device.type]
    a = torch.randn(side, side, device=device)
    with tensor_cores():
        return timed(lambda: a @ a) / (2 * side**3)


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
