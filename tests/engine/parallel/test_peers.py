"""Small sums another way: taken by all ranks or by none, and only where they come out right."""

from __future__ import annotations

import dataclasses
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pw.config import EngineConfig
from pw.engine.parallel import group as groups
from pw.engine.parallel.group import RankGroup
from pw.engine.parallel.peers import SENT_BYTES, PeerSums, own_bytes
from pw.engine.start.demand import demand_of
from pw.engine.start.sources import load
from pw_kernels import cuda_attention
from pw_kernels.dispatch import attention_counters_bytes
from support.engines import make_artifact

CPU = torch.device("cpu")


class OtherWay:
    """Stands in for `PeerSums`; what its ranks do is told beforehand.

    Attributes:
        calls: Sums made, of all ranks.
    """

    broken: tuple[int, ...] = ()  # ranks that cannot be made
    factor = 3.0  # sums of ones and twos are right with 3
    calls = 0

    def __init__(self, inner: Any, *_: Any) -> None:
        if inner.rank() in type(self).broken:
            raise RuntimeError("the driver has it not\nand more")

    @staticmethod
    def supported(size: int, device: torch.device) -> bool:
        return True

    def takes(self, tensor: Tensor) -> bool:
        return tensor.numel() > 1

    def all_reduce(self, tensor: Tensor, add: Tensor | None = None) -> Tensor:
        type(self).calls += 1
        total = torch.full_like(tensor, type(self).factor)
        return total if add is None else total + add

    def leave(self) -> None:
        """See `PeerSums`."""

    def close(self) -> None:
        """See `PeerSums`."""


def sums(folder: Path) -> list[list[float]]:
    """Of ones and twos, on both ranks."""

    def rank(number: int) -> list[float]:
        group = RankGroup(number, 2, folder, CPU, 60.0)
        total: list[float] = group.all_reduce(torch.full((4,), number + 1.0)).tolist()
        more = group.all_reduce(torch.full((4,), number + 1.0), torch.full((4,), 0.5))
        assert more.tolist() == [value + 0.5 for value in total]
        return total

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(rank, range(2)))


@pytest.mark.parametrize(
    ("broken", "factor", "taken"),
    [((), 3.0, True), ((1,), 3.0, False), ((0, 1), 3.0, False), ((), 2.0, False)],
    ids=["both", "one-cannot", "none-can", "wrong"],
)
def test_all_ranks_take_the_other_way_or_none_does(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    broken: tuple[int, ...],
    factor: float,
    taken: bool,
) -> None:
    way = type("Way", (OtherWay,), {"broken": broken, "factor": factor, "calls": 0})
    monkeypatch.setattr(groups, "PeerSums", way)
    monkeypatch.delenv("PW_PEER_SUMS", raising=False)
    assert sums(tmp_path) == [[3.0] * 4] * 2
    # a first one each, then those of use
    assert way.calls == (6 if taken else 0 if broken else 2)
    slower = [text for text in caplog.messages if text.startswith("small sums go over NCCL")]
    assert len(slower) == (len(broken) if broken else 0 if taken else 2)
    assert all("\n" not in text for text in slower)


def test_nobody_takes_it_where_it_is_turned_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    way = type("Way", (OtherWay,), {"calls": 0})
    monkeypatch.setattr(groups, "PeerSums", way)
    monkeypatch.setenv("PW_PEER_SUMS", "0")
    assert sums(tmp_path) == [[3.0] * 4] * 2
    assert way.calls == 0


def test_a_process_takes_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: True)
    monkeypatch.setattr(PeerSums, "made", False)
    assert PeerSums.supported(2, torch.device("cuda", 0))
    monkeypatch.setattr(PeerSums, "made", True)
    assert not PeerSums.supported(2, torch.device("cuda", 0))


def test_which_sums_are_small() -> None:
    peers = PeerSums.__new__(PeerSums)
    peers._bytes = SENT_BYTES // 3  # four ranks
    few, many = (torch.zeros(tokens, 4096, dtype=torch.bfloat16) for tokens in (32, 64))
    assert peers.takes(few)
    assert not peers.takes(many)
    assert not peers.takes(torch.zeros(3))  # 12 bytes
    assert not peers.takes(torch.zeros(4, dtype=torch.int64))  # the kernel adds up floats alone
    assert not peers.takes(torch.zeros(0))
    assert not PeerSums.supported(2, CPU)
    assert not PeerSums.supported(9, torch.device("cuda", 0))  # its kernel is for eight


def test_a_group_that_is_left_has_no_thread(tmp_path: Path) -> None:
    """Gloo's would ask for Python's lock when Python has ended, and abort the process."""

    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    sums(tmp_path)  # whatever is made once is made
    before = threads()
    with ThreadPoolExecutor(2) as pool:
        folder = tmp_path / "more"
        folder.mkdir()
        both = list(pool.map(lambda rank: RankGroup(rank, 2, folder, CPU, 60.0), range(2)))
    assert threads() > before
    for group in both:
        group.close()
        group.close()
    with pytest.raises(RuntimeError, match="left"):
        both[0].all_reduce(torch.zeros(1))
    end = time.monotonic() + 20
    while threads() > before:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_inboxes_are_part_of_the_memory_plan(tmp_path: Path) -> None:
    path = make_artifact("qwen2_moe", tmp_path)[1]
    loaded = load(path, EngineConfig(), CPU)
    skeleton = dataclasses.replace(loaded.skeleton, device=torch.device("cuda"))

    def workspace(size: int) -> int:
        config = EngineConfig(tensor_parallel_size=size)
        return demand_of(loaded.source, skeleton, config, None).workspace

    assert workspace(2) - workspace(1) == own_bytes(2)
    lines = 2 * 2 * (SENT_BYTES // 4) * 8  # two places, two senders, a line of 8 bytes for each 4
    assert lines < own_bytes(2) < lines + (1 << 16)
    assert own_bytes(8) < lines  # they take in from more, and send each less
    assert own_bytes(1) == own_bytes(9) == 0  # NCCL alone


def test_counters_of_attention_are_part_of_the_memory_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_artifact("qwen2_moe", tmp_path)[1]
    loaded = load(path, EngineConfig(), CPU)
    cuda = torch.device("cuda")
    skeleton = dataclasses.replace(loaded.skeleton, device=cuda)

    def workspace() -> int:
        return demand_of(loaded.source, skeleton, EngineConfig(), None).workspace

    size, planned = attention_counters_bytes(cuda), workspace()
    assert size == cuda_attention.make_counters(CPU).nbytes
    assert attention_counters_bytes(CPU) == 0
    monkeypatch.setattr(cuda_attention, "MOST_COUNTERS", 0)
    assert planned - workspace() == size > 0
