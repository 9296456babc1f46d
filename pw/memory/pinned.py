"""Host memory in large slabs, pinned where a GPU copies from it. Knows nothing of planes.

torch's own pinned allocator rounds every request up to a power of two, so that 20 GB of planes
would lock 32 GB. A slab is plain memory that is locked afterwards, to the byte.
"""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import torch
from torch import Tensor

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process


class HostSlab:
    """Pages in one piece of host memory, zeroed, untouched until they are written.

    Args:
        num_pages: At least 1.
        page_bytes: Bytes of a page.
        pin: Lock the memory, so that a GPU copies from it while the host goes on.

    Attributes:
        pages: [num_pages, page_bytes] uint8.
        pinned: Whether the memory is locked; False too when the system refused.
    """

    def __init__(self, num_pages: int, page_bytes: int, *, pin: bool = False) -> None:
        memory = mmap.mmap(-1, num_pages * page_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.pages = torch.frombuffer(memory, dtype=torch.uint8).view(num_pages, page_bytes)
        self.pinned = pin and register(self.pages)
        if self.pinned:
            weakref.finalize(self, _unregister, self.pages)

    @property
    def bytes(self) -> int:
        """Size of the slab."""
        return self.pages.nbytes


def register(memory: Tensor) -> bool:
    """Lock the memory of a host tensor; whether the driver did."""
    try:
        driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        result = driver.cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE)
    except (RuntimeError, AssertionError):  # no driver, or a torch without CUDA
        return False
    return int(result) == 0


def _unregister(memory: Tensor) -> None:
    driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    driver.cudaHostUnregister(memory.data_ptr())
