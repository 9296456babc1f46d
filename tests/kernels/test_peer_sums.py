"""Sums over GPUs that write to each other's memory: the source run on a CPU, code for a GPU."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pw_kernels import reference
from pw_kernels.cuda_peers import (
    DTYPES,
    THREADS,
    WORD_BYTES,
    Inboxes,
    blocks_of,
    constants_of,
    inbox_bytes,
)
from support.cuda_source import CudaSource

SOURCE = CudaSource("peer_sums.cu", "peers_on_cpu.h", [  # defined by the headers
    "store_line", "load_line", "load_flag",
])  # fmt: skip
CAPACITY = 400  # words


class Ranks:
    """Ranks whose inboxes lie in this process, and the kernel of each."""

    def __init__(self, size: int, dtype: torch.dtype, folder: Path) -> None:
        shape = (inbox_bytes(size, CAPACITY) // 8,)
        self._memory = [torch.zeros(shape, dtype=torch.int64) for _ in range(size)]
        addresses = [memory.data_ptr() for memory in self._memory]
        self._kernels: list[Any] = []
        self.inboxes: list[Inboxes] = []
        for rank in range(size):
            numbers = torch.zeros(blocks_of(CAPACITY) + 1, dtype=torch.int32)
            self.inboxes.append(Inboxes(rank, addresses, CAPACITY, numbers[:-1], numbers[-1:]))
            (own := folder / str(rank)).mkdir()
            call = "peer_sum(*(const Arguments*)all);"
            self._kernels.append(SOURCE.compile(own, call, constants_of(rank, size, dtype)))

    def run(self, rank: int, own: Tensor, add: Tensor | None) -> Tensor:
        """What a rank makes of its part; lines of the others must have come, or be given up."""
        out = own.clone()
        arguments = self.inboxes[rank].arguments(out, add)
        blocks = blocks_of(out.nbytes // WORD_BYTES)
        self._kernels[rank].run(ctypes.byref(arguments), blocks, 1, THREADS)
        return out

    def sums(self, parts: list[Tensor], add: Tensor | None) -> list[Tensor]:
        """Of all ranks. A block does not wait on a CPU: each writes first, given up, then again."""
        for rank, inbox in enumerate(self.inboxes):
            turns = inbox.turns.clone()
            inbox.given_up.fill_(1)
            self.run(rank, parts[rank], add)
            inbox.given_up.fill_(0)
            inbox.turns.copy_(turns)
        return [self.run(rank, parts[rank], add) for rank in range(len(parts))]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(("size", "dtype"), [(2, torch.float32), (4, torch.bfloat16)])
def test_every_rank_gets_the_same_sum_in_every_turn(
    size: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Of tensors of different sizes in turn, whose blocks have made different numbers of calls."""
    ranks = Ranks(size, dtype, tmp_path)
    numbers = WORD_BYTES // torch.tensor([], dtype=dtype).element_size()
    for turn, words in enumerate([3, 400, 130, 128, 1, 399, 257]):
        parts = [torch.randn(words * numbers).to(dtype) for _ in range(size)]
        add = torch.randn(words * numbers).to(dtype) if turn % 2 else None
        expected = reference.peer_sum(parts, add)
        for found in ranks.sums(parts, add):
            assert torch.equal(found, expected)
    assert ranks.inboxes[0].turns.tolist() == [7, 4, 3, 2]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rank", "size"), [(0, 2), (7, 8)])
def test_compiles_ahead_of_time(rank: int, size: int, dtype: torch.dtype) -> None:
    nvrtc = pytest.importorskip("pw_kernels.nvrtc", reason="needs cuda-bindings")
    for capability in (80, 90):
        try:
            code = nvrtc.compile_source("peer_sums.cu", constants_of(rank, size, dtype), capability)
        except RuntimeError as error:  # cuda-bindings without the library that it binds
            pytest.skip(f"NVRTC is not installed: {error}")
        assert len(code) > 1000
