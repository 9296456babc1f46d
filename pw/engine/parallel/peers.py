"""Small sums over GPUs that write to each other's memory: one kernel, half of NCCL's time.

Every rank has an inbox that the others see, from torch's symmetric memory. They write their parts
to it and add up what has come in the order of the ranks (`pw_kernels.cuda_peers`), so that the same
bits result on each. NVLink multicast is left alone.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pw_kernels.cuda_peers import (
    DTYPES,
    MOST_RANKS,
    WORD_BYTES,
    Inboxes,
    blocks_of,
    inbox_bytes,
    peer_sum,
)

SENT_BYTES = 1 << 20  # of a sum that a rank has for the others at most; beyond, NCCL is faster


def own_bytes(size: int) -> int:
    """Bytes that each of so many ranks keeps for small sums, on its GPU; where it may try."""
    if not 2 <= size <= MOST_RANKS:
        return 0
    words = _most_bytes(size) // WORD_BYTES
    return inbox_bytes(size, words) + 4 * (blocks_of(words) + 1)  # turns, given_up


def _most_bytes(size: int) -> int:
    """Of a sum of so many ranks."""
    return SENT_BYTES // (size - 1) // WORD_BYTES * WORD_BYTES


class PeerSums:
    """Connects the ranks; all must make it at the same time, and wait for each other then.

    Args:
        nccl: The ranks' group.
        store: Where ranks tell each other things; of this group alone.
        folder: Of the group: its name, which no other group of this process has.
        device: This rank's GPU.

    Raises:
        RuntimeError: This torch, or these GPUs, cannot.

    Attributes:
        made: Whether this process has made one. torch numbers by process what ranks tell each
            other, so that ranks of a second replica would wait for each other in vain.
    """

    made = False

    def __init__(self, nccl: Any, store: Any, folder: Path, device: torch.device) -> None:
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        from torch._C._distributed_c10d import _SymmetricMemory
        from torch.distributed._symmetric_memory import empty

        PeerSums.made = True
        rank, size = nccl.rank(), nccl.size()
        self._name: Any = str(folder)
        self._group = _named(self._name, nccl, store)
        self._bytes = _most_bytes(size)
        capacity = self._bytes // WORD_BYTES
        _SymmetricMemory.set_group_info(self._name, rank, size, store)
        self._inbox = empty(inbox_bytes(size, capacity), dtype=torch.uint8, device=device)
        self._met = _SymmetricMemory.rendezvous(self._inbox, self._name)
        self._inbox.zero_()
        turns = torch.zeros(blocks_of(capacity), dtype=torch.int32, device=device)
        self._given_up = torch.zeros(1, dtype=torch.int32, device=device)
        addresses = [int(address) for address in self._met.buffer_ptrs]
        self._inboxes = Inboxes(rank, addresses, capacity, turns, self._given_up)
        self._one = torch.ones(1, dtype=torch.int32, pin_memory=True)
        self._aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)  # the inbox is empty before others are told

    def close(self) -> None:
        """Forget the name; after all sums."""
        from torch._C._distributed_c10d import _unregister_process_group

        _unregister_process_group(self._name)

    @staticmethod
    def supported(size: int, device: torch.device) -> bool:
        """Whether so many ranks, one on each of this machine's first GPUs, may try."""
        if device.type != "cuda" or not 2 <= size <= MOST_RANKS or PeerSums.made:
            return False
        own = device.index or 0
        others = (other for other in range(size) if other != own)
        return all(torch.cuda.can_device_access_peer(own, other) for other in others)

    def takes(self, tensor: Tensor) -> bool:
        """Whether a sum is made here: the same answer on all ranks, whose shapes are alike."""
        size = tensor.nbytes
        return tensor.dtype in DTYPES and 0 < size <= self._bytes and size % WORD_BYTES == 0

    def all_reduce(self, tensor: Tensor, add: Tensor | None = None) -> Tensor:
        """The sum of a contiguous tensor over the ranks, plus `add`, on the current stream.

        In the memory of the tensor, where that is aligned.
        """
        own = tensor if tensor.data_ptr() % WORD_BYTES == 0 else tensor.clone()
        if add is not None and (not add.is_contiguous() or add.data_ptr() % WORD_BYTES):
            add = add.clone(memory_format=torch.contiguous_format)
        return peer_sum(self._inboxes, own, add)

    def leave(self) -> None:
        """End the sums under way on this rank, whatever they give, and all later ones.

        Any thread may call it. Their kernel waits on the device for ranks that may have gone.
        """
        with torch.cuda.stream(self._aside):
            self._given_up.copy_(self._one, non_blocking=True)
        self._aside.synchronize()


def _named(name: Any, nccl: Any, store: Any) -> Any:
    """The ranks under a name by which torch's symmetric memory finds them."""
    from torch._C._distributed_c10d import ProcessGroup, _register_process_group

    group = ProcessGroup(store, nccl.rank(), nccl.size())
    kind = ProcessGroup.BackendType.NCCL
    group._set_default_backend(kind)
    group._register_backend(torch.device("cuda"), kind, nccl)
    group._set_group_name(name)
    _register_process_group(name, group)
    return group
