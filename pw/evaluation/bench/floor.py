"""The least time that a decode step can take: the bytes it has to read, at the speed of a copy.

Experts that no token of the step goes to are not read, and of the others the planes and the table
of their width alone. So the floor depends on the routing of the step, which is looked at.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pw.blocks import MODULES
from pw.engine import Engine
from pw.engine.experts import RoutedExperts
from pw.errors import PwError

_COPIED = 1 << 31  # bytes, far beyond any cache
_COPIES = 10
_ITEM = 2  # bytes of a number in a table and of an unquantized weight on a GPU


@dataclass(frozen=True)
class StepBytes:
    """What one decode step reads."""

    dense: int  # attention, norms, routers, shared experts, head; of the embedding a row a token
    experts: int
    kv: int
    experts_read: float  # of a layer, mean

    @property
    def total(self) -> int:
        """All of it."""
        return self.dense + self.experts + self.kv


class _RoutingWatch:
    """Experts that note who is asked. For a step by calls: graphs do not come by here."""

    def __init__(self, experts: RoutedExperts) -> None:
        self._experts = experts
        self.batch = None
        self.asked: dict[int, NDArray[np.int64]] = {}

    def __call__(
        self, slot: int, module: nn.Module, x: Tensor, ids: Tensor, weights: Tensor
    ) -> Tensor:
        """See `RoutedExperts`."""
        self.asked[slot] = np.unique(ids.cpu().numpy())
        return self._experts(slot, module, x, ids, weights)


def step_bytes(engine: Engine) -> StepBytes:
    """Bytes that the next decode step reads. Makes it, by calls.

    Args:
        engine: An engine all of whose requests decode.
    """
    parts = engine._parts
    runner, skeleton = parts.runner, parts.skeleton
    watch, steps = _RoutingWatch(runner._experts), runner.steps
    runner.steps = None
    skeleton.bind_experts(watch)
    try:
        for _ in range(3):  # where steps overlap, the next one is on its way
            engine.step()
            if watch.asked:
                break
        else:
            raise PwError("no decode step was made by calls")
    finally:
        skeleton.bind_experts(runner._experts)
        runner.steps = steps
    read = sum(map(len, watch.asked.values()))
    return StepBytes(
        dense=_dense_bytes(engine),
        experts=_expert_bytes(engine, watch.asked),
        kv=_kv_bytes(engine),
        experts_read=read / max(1, len(watch.asked)),
    )


def _dense_bytes(engine: Engine) -> int:
    skeleton = engine._parts.skeleton
    embedding = skeleton.model.get_input_embeddings().weight
    head = skeleton.model.get_output_embeddings().weight
    apart = embedding.data_ptr() != head.data_ptr()
    return skeleton.dense_bytes - (embedding.nbytes if apart else 0)


def _expert_bytes(engine: Engine, asked: dict[int, NDArray[np.int64]]) -> int:
    table, geometry = engine._parts.table, engine._parts.skeleton.geometry
    item = engine._parts.skeleton.dtype.itemsize
    found = 0
    for number, module in enumerate(MODULES):
        shape = geometry.shape(module)
        for slot, experts in asked.items():
            if table is None:
                found += len(experts) * shape.weights * item
                continue
            index = (slot * geometry.experts + experts) * len(MODULES) + number
            bits = table.committed[index]
            found += int((bits * (shape.weights // 8) + shape.rows * _ITEM * (1 << bits)).sum())
    return found


def _kv_bytes(engine: Engine) -> int:
    parts = engine._parts
    layers, item = parts.skeleton.kv.layers, parts.skeleton.dtype.itemsize
    lengths = [sequence.length for sequence in parts.scheduler.running]
    return sum(
        layer.width * item * min(length, layer.window or length)
        for layer in layers
        for length in lengths
    )


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second that a copy on the device moves, each byte counted as read and as written."""
    if device.type != "cuda":
        source = torch.ones(_COPIED >> 5, dtype=torch.uint8)
        target = torch.zeros_like(source)
        started = time.perf_counter()
        for _ in range(_COPIES):
            target.copy_(source)
        return 2 * source.nbytes * _COPIES / (time.perf_counter() - started)
    source = torch.ones(_COPIED, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    target.copy_(source)
    begin.record()
    for _ in range(_COPIES):
        target.copy_(source)
    end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return 2 * source.nbytes * _COPIES / milliseconds * 1e3
