"""The sum over GPUs that write to each other's memory, in CUDA C++ compiled at run time.

One launch (`peer_sums.cu`) where NCCL's ring takes twice as long: words go to the other ranks with
the number of the call beside them, so that nothing but their arrival is waited for. What follows a
sum in a layer, the residual, is added in the same pass, and the launch may begin while the one
before ends. What it means: `reference.peer_sum`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

THREADS = 128
WORD_BYTES = 16
MOST_RANKS = 8
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_PLACES = 2
_LINE_BYTES = 8  # four of them carry a word


@cache
def structure(ranks: int) -> type[ctypes.Structure]:
    """`Arguments` of peer_sums.cu, which is compiled for a number of ranks."""

    class Arguments(ctypes.Structure):
        _fields_ = (
            ("own", ctypes.c_void_p),
            ("add", ctypes.c_void_p),
            ("out", ctypes.c_void_p),
            ("inboxes", ctypes.c_void_p * ranks),
            ("turns", ctypes.c_void_p),
            ("given_up", ctypes.c_void_p),
            ("count", ctypes.c_int),
            ("capacity", ctypes.c_int),
        )

    return Arguments


def inbox_bytes(ranks: int, capacity: int) -> int:
    """Bytes of a rank's inbox for tensors of up to `capacity` words, zeros at first."""
    return _PLACES * ranks * (WORD_BYTES // 4) * _LINE_BYTES * capacity


def blocks_of(count: int) -> int:
    """Blocks that sum so many words."""
    return -(-count // THREADS)


def constants_of(rank: int, ranks: int, dtype: torch.dtype) -> dict[str, int]:
    """Macros of the kernel of a rank."""
    return {
        "RANKS": ranks,
        "RANK": rank,
        "THREADS": THREADS,
        "WIDE": int(dtype == torch.float32),
        "FLOAT16": int(dtype == torch.float16),
    }


@dataclass(frozen=True, eq=False)
class Inboxes:
    """What the ranks write to, as one of them sees it.

    Attributes:
        rank: This one, from 0.
        addresses: [R] of the inboxes of all ranks in this process.
        capacity: Words of a tensor at most.
        turns: [blocks] int32 zeros at first: calls so far.
        given_up: [1] int32; not 0: sums wait for nobody, whatever they give.
    """

    rank: int
    addresses: Sequence[int]
    capacity: int
    turns: Tensor
    given_up: Tensor

    def arguments(self, own: Tensor, add: Tensor | None) -> ctypes.Structure:
        """Of the kernel, for a sum in place."""
        ranks = len(self.addresses)
        return structure(ranks)(
            own.data_ptr(), 0 if add is None else add.data_ptr(), own.data_ptr(),
            (ctypes.c_void_p * ranks)(*self.addresses), self.turns.data_ptr(),
            self.given_up.data_ptr(), own.nbytes // WORD_BYTES, self.capacity,
        )  # fmt: skip


def peer_sum(inboxes: Inboxes, own: Tensor, add: Tensor | None = None) -> Tensor:
    """Replace a tensor by its sum over the ranks, plus `add`, rounded once: as the reference.

    Args:
        inboxes: Of these ranks, which make the same calls in the same order.
        own: Contiguous, whole words at most `capacity`, aligned to a word, of one of `DTYPES`.
        add: As `own`, or None.
    """
    from pw_kernels import nvrtc

    ranks, index = len(inboxes.addresses), own.device.index or 0
    constants = tuple(constants_of(inboxes.rank, ranks, own.dtype).items())
    arguments = inboxes.arguments(own, add)
    nvrtc.kernel("peer_sums.cu", "peer_sum", constants, index).launch(
        (blocks_of(own.nbytes // WORD_BYTES),), THREADS, 0, arguments, overlap=True
    )
    return own
