"""Puts an engine together: artifact, model, budget, arena, planner, scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from pw.config import EngineConfig
from pw.engine.experts import DenseExperts, PagedExperts, RoutedExperts, RoutingCounter
from pw.engine.precision.policies import FixedPrecision, Precision
from pw.engine.precision.quality import Quality, make_quality, settle_residual
from pw.engine.precision.trace import TraceWriter
from pw.engine.runner import ModelRunner
from pw.engine.scheduler import UNQUANTIZED, Scheduler
from pw.engine.start.demand import budget_of, demand_of
from pw.engine.start.sources import Loaded, load
from pw.engine.start.widths import start_precision
from pw.errors import ConfigError
from pw.memory.arena import Arena
from pw.memory.budget import Demand, MemoryPlan, plan_memory
from pw.memory.host_store import HostPlaneStore
from pw.memory.kv_cache import KvCache
from pw.memory.mover import READERS, Mover
from pw.memory.page_table import WeightPageTable
from pw.memory.pool import PagePool
from pw.models.skeleton import Skeleton
from pw.models.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Parts:
    """What an engine is made of."""

    model_name: str
    artifact_hash: str
    stated_model_len: int  # tokens that the model, or the user, states as the limit
    skeleton: Skeleton
    tokenizer: Tokenizer
    memory: MemoryPlan
    arena: Arena
    pool: PagePool
    kv: KvCache
    table: WeightPageTable | None  # None with policy dense, as the next three
    store: HostPlaneStore | None
    mover: Mover | None
    quality: Quality | None  # None with a fixed precision too
    precision: Precision
    scheduler: Scheduler
    runner: ModelRunner
    trace: TraceWriter


@dataclass(frozen=True)
class _Weights:
    """The experts and who moves them. Names as in `Parts`."""

    experts: RoutedExperts
    precision: Precision
    table: WeightPageTable | None = None
    store: HostPlaneStore | None = None
    mover: Mover | None = None
    quality: Quality | None = None


def build_parts(path: Path, config: EngineConfig) -> Parts:
    """Load an artifact and divide the memory budget. See `Engine.from_artifact`."""
    replayed = config.policy.path if config.policy.kind == "replay" else None
    if config.trace and replayed and config.trace.resolve() == replayed.resolve():
        raise ConfigError(f"the trace would overwrite what it replays: `{config.trace}`")
    device = _device(config)
    budget = budget_of(config, device)
    loaded = load(path, config, device)
    source, skeleton = loaded.source, loaded.skeleton
    config = settle_residual(source, config)
    tokenizer = load_tokenizer(path)
    demand = demand_of(source, skeleton, config, loaded.dense)
    memory = plan_memory(budget, demand)
    arena = Arena(memory.num_pages, memory.page_bytes, device)
    pool = PagePool(memory.num_pages)
    kv = KvCache(
        skeleton.kv,
        demand.kv_dtype,
        arena,
        pool,
        config.max_num_seqs,
        memory.max_model_len,
        source.geometry.blocks,
        chunk_tokens=config.max_num_batched_tokens,
        prefix_rule=config.prefix_cache_precision if config.enable_prefix_caching else None,
    )
    trace = TraceWriter(config.trace)
    try:
        weights = _load_weights(loaded, config, demand, memory, arena, pool, trace)
    except BaseException:
        trace.close()
        raise
    table = weights.table
    scheduler = Scheduler(
        kv,
        pool,
        weights.precision,
        config.max_num_seqs,
        config.max_num_batched_tokens,
        (lambda: UNQUANTIZED) if table is None else table.tag,
    )
    return Parts(
        model_name=source.model_name,
        artifact_hash=source.artifact_hash,
        stated_model_len=demand.max_model_len,
        skeleton=skeleton,
        tokenizer=tokenizer,
        memory=memory,
        arena=arena,
        pool=pool,
        kv=kv,
        table=table,
        store=weights.store,
        mover=weights.mover,
        quality=weights.quality,
        precision=weights.precision,
        scheduler=scheduler,
        runner=ModelRunner(skeleton, weights.experts, kv, tokenizer.vocab_size),
        trace=trace,
    )


def _load_weights(
    loaded: Loaded,
    config: EngineConfig,
    demand: Demand,
    memory: MemoryPlan,
    arena: Arena,
    pool: PagePool,
    trace: TraceWriter,
) -> _Weights:
    """Bring the experts in, unquantized or at their first widths."""
    source, skeleton, device = loaded.source, loaded.skeleton, arena.pages.device
    if loaded.dense is not None:
        experts = DenseExperts(loaded.dense, skeleton.activations, skeleton.biases)
        return _Weights(experts, FixedPrecision())
    on_gpu = device.type == "cuda"
    store = HostPlaneStore(
        source,
        memory.layouts,
        movable=_movable(config, demand),
        limit_bytes=config.offload_cpu_memory,
        pin=on_gpu,
        alike=config.load_format == "dummy",
        readers=READERS if on_gpu else 0,
    )
    table = WeightPageTable(source.geometry, memory.layouts, arena, pool, store)
    mover = Mover(
        arena,
        store,
        bytes_per_second=config.planner.transfer_budget_bytes if on_gpu else None,
        readers=READERS if on_gpu else 0,
    )
    counter = quality = None
    if config.policy.kind in ("adaptive", "replay"):
        counter = RoutingCounter(source.geometry, device)
        quality = make_quality(source, table, config.planner, counter, device)
    precision = start_precision(source, config, demand, memory, table, mover, pool, quality, trace)
    paged = PagedExperts(
        table, arena, skeleton.activations, skeleton.biases, source.lut_dtype, counter
    )
    return _Weights(paged, precision, table, store, mover, quality)


def _movable(config: EngineConfig, demand: Demand) -> tuple[int, int]:
    """Least and most bits of blocks that change; equal where none does."""
    if config.policy.kind == "replay":  # a trace may reach any width
        return demand.stored_bits
    if config.policy.kind != "adaptive":
        return (0, 0)
    return int(demand.least_bits.min()), int(demand.most_bits.max())


def _device(config: EngineConfig) -> torch.device:
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError("no CUDA device is to be had: `--device cuda`", "use `--device cpu`")
    return torch.device(config.device)
