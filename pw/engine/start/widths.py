"""The widths that an engine starts with, and who changes them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pw.blocks import ExpertGeometry
from pw.config import EngineConfig
from pw.engine.precision.adaptive import AdaptivePrecision
from pw.engine.precision.policies import Precision, ReplayedPrecision
from pw.engine.precision.quality import Quality
from pw.engine.precision.trace import FORMAT, Replay, TraceWriter, read_replay
from pw.engine.start.sources import WeightSource
from pw.errors import BudgetError, ConfigError
from pw.memory.budget import Demand, MemoryPlan
from pw.memory.mover import Mover
from pw.memory.page_table import WeightPageTable
from pw.memory.pool import PagePool
from pw.planning.planner import allocate


def start_precision(
    source: WeightSource,
    config: EngineConfig,
    demand: Demand,
    memory: MemoryPlan,
    table: WeightPageTable,
    mover: Mover,
    pool: PagePool,
    quality: Quality | None,
    trace: TraceWriter,
    fixed: Precision,
) -> Precision:
    """Load the first widths and make who changes them; `fixed` where nobody does."""
    policy = config.policy
    bounds = (int(demand.least_bits.min()), int(demand.most_bits.max()))
    precision = fixed
    bits = demand.most_bits  # of the static policies
    if policy.kind == "replay":
        assert policy.path is not None
        assert quality is not None
        replay = read_replay(policy.path)
        _check_replay(replay, source, memory)
        bits = np.array(replay.bits, dtype=np.int64)
        precision = ReplayedPrecision(table, pool, mover, trace, quality, bounds, replay)
    elif policy.kind == "adaptive":
        assert quality is not None
        bits = _first_bits(quality, config, bounds, memory, source.geometry)
        precision = AdaptivePrecision(table, pool, mover, trace, quality, bounds, config.planner)
    table.load(bits)
    trace.write(
        "start",
        format=FORMAT,
        artifact=source.artifact_hash,
        policy=str(policy),
        budget=memory.budget,
        pages=memory.num_pages,
        page_bytes=memory.page_bytes,
        bits=bits.tolist(),
    )
    return precision


def _check_replay(replay: Replay, source: WeightSource, memory: MemoryPlan) -> None:
    """Refuse a trace that this engine cannot follow.

    Raises:
        ConfigError: Another artifact, or too few pages.
    """
    if replay.artifact != source.artifact_hash:
        raise ConfigError(
            f"the trace was recorded with another artifact: {replay.artifact[:12]}, "
            f"this one is {source.artifact_hash[:12]}"
        )
    if replay.page_bytes != memory.page_bytes or replay.pages > memory.num_pages:
        raise ConfigError(
            f"the trace was recorded with {replay.pages} pages of {replay.page_bytes} bytes, "
            f"this memory budget gives {memory.num_pages} of {memory.page_bytes}",
            "give the budget and the limits of the recorded run",
        )
    geometry, widths = source.geometry, range(source.min_bits, source.max_bits + 1)
    layers, experts = set(geometry.layers), range(geometry.experts)
    changes = [change for step in replay.transitions.values() for change in step]
    if (
        len(replay.bits) != geometry.blocks
        or not set(replay.bits) <= set(widths)
        or any(c.key.layer not in layers or c.key.expert not in experts for c in changes)
        or any(c.to_bits not in widths for c in changes)
    ):
        raise ConfigError("the trace names blocks or widths that the artifact does not have")
    pages = sum(
        memory.layouts[index % 2].resident_pages(bits) for index, bits in enumerate(replay.bits)
    )
    if pages > memory.num_pages:
        raise ConfigError(
            f"the trace starts with widths of {pages} pages, there are {memory.num_pages}"
        )


def _first_bits(
    quality: Quality,
    config: EngineConfig,
    bounds: tuple[int, int],
    memory: MemoryPlan,
    geometry: ExpertGeometry,
) -> NDArray[np.int64]:
    """Widest widths that leave the low watermark free; the hot floors yield if they must."""
    low, high = bounds
    top = np.full(geometry.blocks, high, dtype=np.int64)
    free = math.ceil(config.planner.low_watermark * memory.num_pages) + 1
    budget = (memory.num_pages - free) * memory.page_bytes
    state = quality.state(top, top)
    for floors in (state.floors.clip(low, high), np.full_like(top, low)):
        try:
            return allocate(replace(state, floors=floors), budget)
        except BudgetError:
            continue
    return np.full_like(top, low)
