"""Processes that share the work of an offline stage: the ranks of `torchrun`, or this one alone.

Text is split by whole batches, so that every rank computes what a single process would; sums are
added in the order of the ranks, so that the same ranks give the same bytes again. What is
exchanged is small (sums of one layer, arrays of a prompt), so gloo carries it on GPUs too.

There is no time limit on waiting: a rank that is slow keeps the others waiting, one that has ended
closes its connections, and `torchrun` ends the others.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from pw.errors import ConfigError

_WAIT = timedelta(days=30)

T = TypeVar("T")


def usable_device(device: str) -> str:
    """The name of a device that is there; "auto" is the GPU if there is one.

    Raises:
        ConfigError: There is no such device.
    """
    found = torch.cuda.is_available()
    if device == "auto":
        return "cuda" if found else "cpu"
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"device must be auto, cpu or cuda: `{device}`")
    if device == "cuda" and not found:
        raise ConfigError(
            "torch finds no GPU for `--device cuda`",
            "leave it out to use the CPU, or install a torch that is built for CUDA",
        )
    return device


class Ranks:
    """This process among those that work on a stage.

    Args:
        rank: Its number, from 0.
        size: How many there are.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    @classmethod
    def join(cls) -> Ranks:
        """Meet the ranks that `torchrun` started with this process; alone without it.

        Raises:
            ConfigError: The environment names a group that cannot be joined.
        """
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return ALONE
        try:
            dist.init_process_group("gloo", timeout=_WAIT)
        except (ValueError, RuntimeError) as error:
            raise ConfigError(
                f"cannot join the group of WORLD_SIZE {os.environ['WORLD_SIZE']}: {error}",
                "start it as `torchrun --nproc-per-node N -m pw calibrate ...`",
            ) from error
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def first(self) -> bool:
        """Whether this one writes tables, publishes and reports."""
        return self.rank == 0

    def device(self, device: str) -> str:
        """The device of this rank: where several share a machine, each has a GPU of its own.

        Raises:
            ConfigError: There is no such device.
        """
        device = usable_device(device)
        if device != "cuda" or self.size == 1:
            return device
        return f"cuda:{int(os.environ.get('LOCAL_RANK', self.rank)) % torch.cuda.device_count()}"

    def part(self, items: Sequence[T]) -> Sequence[T]:
        """This rank's run of neighbouring items; in the order of the ranks they are all items."""
        count = len(items)
        return items[self.rank * count // self.size : (self.rank + 1) * count // self.size]

    def own(self, costs: Sequence[float]) -> set[int]:
        """Jobs (indices) that this rank does, packed so that none has much more than others.

        Args:
            costs: Of each job; every rank gives the same.
        """
        loads, mine = [0.0] * self.size, set()
        for job in sorted(range(len(costs)), key=lambda job: (-costs[job], job)):
            rank = loads.index(min(loads))
            loads[rank] += costs[job]
            if rank == self.rank:
                mine.add(job)
        return mine

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors by their sums over the ranks, added in the order of the ranks."""
        if self.size == 1:
            return
        for tensor in tensors:
            host = tensor.cpu().contiguous()
            parts = [torch.empty_like(host) for _ in range(self.size)]
            dist.all_gather(parts, host)
            total = parts[0]
            for part in parts[1:]:
                total += part
            tensor.copy_(total)

    def join_rows(self, array: NDArray[np.generic]) -> NDArray[np.generic]:
        """The rows of all ranks, in their order."""
        if self.size == 1:
            return array
        parts: list[NDArray[np.generic]] = [array] * self.size
        dist.all_gather_object(parts, array)
        return np.concatenate(parts)

    def least(self, number: int) -> int:
        """The least of the numbers that the ranks give."""
        if self.size == 1:
            return number
        value = torch.tensor(number, dtype=torch.int64)
        dist.all_reduce(value, dist.ReduceOp.MIN)
        return int(value)

    def wait(self) -> None:
        """Go on when all ranks are here."""
        if self.size > 1:
            dist.barrier()

    def leave(self) -> None:
        """Part from the others, all having come to the end."""
        if self.size > 1:
            dist.barrier()
            dist.destroy_process_group()


ALONE = Ranks()
