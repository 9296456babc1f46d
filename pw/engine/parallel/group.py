"""The ranks' sum over the wire between them: NCCL between GPUs, gloo between CPUs.

Small sums between GPUs that see each other's memory go another way (`pw.engine.parallel.peers`).
One sum is all that they compute together; everything else goes from rank 0 to the others as
messages (`pw.engine.parallel.messages`). The group is an object of its own, not torch's default
group: an engine may be one of several in its process. Ranks find each other in a folder that only
this user can read, and gloo listens on the loopback address alone.
"""

from __future__ import annotations

import logging
import os
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]
    AllreduceOptions,
    FileStore,
    PrefixStore,
)

from pw.engine.parallel.peers import PeerSums

logger = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
_TRIED = 1024  # numbers of a first sum whose result is known
_LEAVE_SECONDS = 3.0  # for a group to be left; NCCL does not leave while a graph holds a sum
_NCCL = {
    # A rank that is lost or late is seen to by `pw.engine.parallel.team`, with an exit code of 1
    # and a reason; torch would abort the process.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # Capturing a sum must not wait for the other ranks: they would have to register its buffers.
    "NCCL_GRAPH_REGISTER": "0",
}


class RankGroup:
    """The ranks of a replica, connected.

    Args:
        rank: This one, from 0.
        size: How many there are. All must come here, or none goes on.
        folder: Where they meet; private, empty.
        device: Of the tensors.
        timeout: Seconds that a rank waits for the others, here and in a sum.

    Raises:
        RuntimeError: The others have not come.
    """

    def __init__(
        self, rank: int, size: int, folder: Path, device: torch.device, timeout: float
    ) -> None:
        self.rank, self.size, self._device = rank, size, device
        store = FileStore(str(folder / "ranks"), size)
        store.set_timeout(timedelta(seconds=timeout))
        make = _nccl if device.type == "cuda" else _gloo
        self._group: Any = make(store, rank, size, timedelta(seconds=timeout))
        self._options = AllreduceOptions()
        self._options.asyncOp = False
        self._peers: PeerSums | None = None
        if not self.agree(True):  # the connection is made now
            raise RuntimeError(f"not all of {size} ranks have met")
        self._peers = self._connect_peers(store, folder)

    def all_reduce(self, tensor: Tensor, add: Tensor | None = None) -> Tensor:
        """Replace a tensor by the sum over the ranks, the same bits on each; on the current stream.

        Args:
            tensor: This rank's part; its memory may be that of the result.
            add: Of the same shape and type, equal on all ranks: added to the sum.

        Raises:
            RuntimeError: A rank has gone, or has not come in time, or this one has left.
        """
        group = self._group  # one that is left meanwhile ends its sums itself
        if group is None:
            raise RuntimeError("the group has been left")
        whole = tensor.contiguous()
        if self._peers is not None and self._peers.takes(whole):
            return self._peers.all_reduce(whole, add)
        work = group.allreduce([whole], self._options)
        if work is not None:  # NCCL's is part of the current stream, and needs no wait
            work.wait()
        return whole if add is None else add + whole

    def agree(self, ready: bool) -> bool:
        """Whether all ranks are ready."""
        votes = self.all_reduce(torch.tensor([float(ready)], device=self._device))
        return int(votes) == self.size

    def _connect_peers(self, store: Any, folder: Path) -> PeerSums | None:
        """Another way for small sums, if all ranks have it and it gives the right ones.

        `PW_PEER_SUMS=0` in the environment of a rank turns it off.
        """
        wanted = os.environ.get("PW_PEER_SUMS") != "0"
        if not self.agree(wanted and PeerSums.supported(self.size, self._device)):
            return None
        peers = None
        try:
            peers = PeerSums(self._group, PrefixStore("peers", store), folder, self._device)
        except Exception as error:  # whatever a torch or a driver does that has it not
            logger.warning("small sums go over NCCL, slower: %s", str(error).partition("\n")[0])
        if not self.agree(peers is not None) or peers is None:
            return None
        ones = torch.full((_TRIED,), float(self.rank + 1), device=self._device)
        right = bool((peers.all_reduce(ones) == self.size * (self.size + 1) / 2).all())
        if not self.agree(right):
            logger.warning("small sums go over NCCL, slower: another way gave wrong ones")
            return None
        return peers

    def close(self) -> None:
        """Leave; who waits in a sum here waits no longer."""
        leave = threading.Thread(target=self._leave, name="pw-leave", daemon=True)
        leave.start()
        leave.join(_LEAVE_SECONDS)

    def _leave(self) -> None:
        group = self._group
        if group is None:  # left already
            return
        if self._peers is not None:
            self._peers.leave()
        group.abort()
        if self._peers is not None:
            self._peers.close()
        if self._device.type == "cpu":
            # Gloo's threads take Python's lock with their last sum, and abort the process where
            # Python has ended before.
            self._group = None


def _gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    from torch.distributed import ProcessGroupGloo

    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
    options._timeout = timeout
    return ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    from torch.distributed import ProcessGroupNCCL

    for name, value in _NCCL.items():
        os.environ.setdefault(name, value)
    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return ProcessGroupNCCL(store, rank, size, options)
