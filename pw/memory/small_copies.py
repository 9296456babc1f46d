"""Small copies between host and device that nobody waits for, and the one wait for a step.

To a GPU they go through pinned memory in stream order: a copy from pageable memory would first wait
for all that the stream has to do. On a CPU a copy is a view or a plain copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """A tensor of an array's values on a device, in the order of the current stream.

    On a CPU it shares the array's memory.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: Tensor) -> NDArray[Any]:
    """An array of a tensor's values as they are now, filled once a later `mark` is reached."""
    if tensor.device.type == "cpu":
        copied: NDArray[Any] = np.array(tensor.numpy())
        return copied
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor.contiguous(), non_blocking=True)
    filled: NDArray[Any] = host.numpy()
    return filled


def mark(device: torch.device) -> Callable[[], None]:
    """A mark behind all copies of `to_host` so far: called, it returns when they have arrived.

    The only place where the host waits for a step, and not for what has been launched after it.
    """
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    wait: Callable[[], None] = event.synchronize
    return wait
