"""Small sums over GPUs that read each other's memory: one kernel, where NCCL takes twice as long.

torch's symmetric memory: every rank writes its part to a buffer that the others see, waits until
all have, and adds up all parts in the order of the ranks, so that the same bits result on each.
NVLink multicast is left alone.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

READ_BYTES = 1 << 20  # that a rank reads from the others in a sum at most; beyond, NCCL is faster
_SIZES = (2, 4, 8)  # ranks for which torch adds up in one order on all
_DTYPES = (torch.bfloat16, torch.float32)
_LEAVE_SECONDS = 2.0  # for the sums of two steps to end without the other ranks
_ALIGNED = 16  # bytes: kernels for less are slower, and need not agree between the ranks


class PeerSums:
    """Connects the ranks; all must make it at the same time.

    Args:
        nccl: The ranks' group.
        store: Where ranks tell each other things; of this group alone.
        folder: Of the group: its name, which no other group of this process has.
        device: This rank's GPU.

    Raises:
        RuntimeError: This torch, or these GPUs, cannot.
    """

    def __init__(self, nccl: Any, store: Any, folder: Path, device: torch.device) -> None:
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        from torch._C._distributed_c10d import _SymmetricMemory
        from torch.distributed._symmetric_memory import empty

        rank, size = nccl.rank(), nccl.size()
        self._name: Any = str(folder)
        self._group = _named(self._name, nccl, store)
        self._bytes = READ_BYTES // (size - 1)
        self._sum: Any = torch.ops.symm_mem.one_shot_all_reduce_copy_out
        _SymmetricMemory.set_group_info(self._name, rank, size, store)
        self._buffer = empty(self._bytes, dtype=torch.uint8, device=device)
        met = _SymmetricMemory.rendezvous(self._buffer, self._name)
        pads = [met.get_signal_pad(other) for other in range(size)]
        self._own_pad, self._pads = pads[rank], [*pads[:rank], *pads[rank + 1 :]]
        self._zeros, self._ones = torch.zeros_like(pads[0]), torch.ones_like(pads[0])
        self._aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._write_pads(self._zeros)  # loads what `leave` runs, which would wait for a sum later

    def close(self) -> None:
        """Forget the name; after all sums."""
        from torch._C._distributed_c10d import _unregister_process_group

        _unregister_process_group(self._name)

    @staticmethod
    def supported(size: int, device: torch.device) -> bool:
        """Whether so many ranks, one on each of this machine's first GPUs, may try."""
        if device.type != "cuda" or size not in _SIZES:
            return False
        own = device.index or 0
        others = (other for other in range(size) if other != own)
        return all(torch.cuda.can_device_access_peer(own, other) for other in others)

    def takes(self, tensor: Tensor) -> bool:
        """Whether a sum is made here: the same answer on all ranks, whose shapes are alike."""
        size = tensor.numel() * tensor.element_size()
        return tensor.dtype in _DTYPES and 0 < size <= self._bytes and size % _ALIGNED == 0

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Replace a contiguous tensor by the sum over the ranks, on the current stream."""
        if tensor.data_ptr() % _ALIGNED:
            tensor = tensor.clone()
        size = tensor.numel() * tensor.element_size()
        shared = self._buffer[:size].view(tensor.dtype).view_as(tensor)
        summed: Tensor = self._sum(shared, tensor, "sum", self._name, tensor)
        return summed

    def leave(self) -> None:
        """End the sums under way on this rank, whatever they give; any thread may call it.

        Their kernel waits on the device for ranks that may have gone. What it waits for is written
        in their place, until nothing is left to be computed here.
        """
        end = time.monotonic() + _LEAVE_SECONDS
        with torch.cuda.device(self._buffer.device):
            last: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            last.record(torch.cuda.default_stream())
            while not last.query() and time.monotonic() < end:
                self._write_pads(self._ones)

    def _write_pads(self, own: Tensor) -> None:
        """Say that all ranks have come (`own` is ones), and that they have seen that we have."""
        with torch.cuda.stream(self._aside):
            self._own_pad.copy_(own)
            for pad in self._pads:
                pad.copy_(self._zeros)
        self._aside.synchronize()


def _named(name: Any, nccl: Any, store: Any) -> Any:
    """The ranks under a name by which torch's operations find them."""
    from torch._C._distributed_c10d import ProcessGroup, _register_process_group

    group = ProcessGroup(store, nccl.rank(), nccl.size())
    kind = ProcessGroup.BackendType.NCCL
    group._set_default_backend(kind)
    group._register_backend(torch.device("cuda"), kind, nccl)
    group._set_group_name(name)
    _register_process_group(name, group)
    return group
