"""Puts an engine together: artifact, model, budget, arena, planner, scheduler."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from pw.config import EngineConfig, format_bytes
from pw.engine.experts import DenseExperts, PagedExperts, RoutedExperts, RoutingCounter
from pw.engine.parallel.lead import LeadFixed, LeadMover, LeadRunner, LeadTable
from pw.engine.parallel.seat import Seat, by_rank, share_of
from pw.engine.parallel.share import Share
from pw.engine.parallel.team import Team, plan_digest
from pw.engine.precision.policies import FixedPrecision, Precision
from pw.engine.precision.quality import Quality, make_quality
from pw.engine.precision.trace import TraceWriter
from pw.engine.runner import ModelRunner
from pw.engine.scheduler import UNQUANTIZED, Scheduler
from pw.engine.start.demand import decodes_in_graphs
from pw.engine.start.ground import Ground, device_of, lay_ground
from pw.engine.start.widths import start_precision
from pw.errors import ConfigError
from pw.memory.arena import Arena
from pw.memory.budget import MemoryPlan
from pw.memory.host_store import HostPlaneStore
from pw.memory.kv_cache import KvCache
from pw.memory.mover import Mover
from pw.memory.page_table import WeightPageTable
from pw.memory.pool import PagePool
from pw.models.skeleton import Skeleton
from pw.models.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger("pw.engine")

_SHORT_CONTEXT = 256  # tokens; a chat's template and one answer are about as long


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
    team: Team | None = None  # the other ranks, where several share the model
    share: Share | None = None  # what each of them holds of the blocks


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
    device = device_of(config)
    if config.tensor_parallel_size == 1:
        parts = _assemble(lay_ground(path, config, device), None)
        if decodes_in_graphs(config, device):
            parts.runner.capture(config.max_num_seqs)
            parts.runner.compile_draw()
        return parts
    seat = Seat(0, config.tensor_parallel_size, config.enable_expert_parallel)
    if device.type == "cpu":  # ranks share the cores, and the memory plan counts threads' scratch
        torch.set_num_threads(max(1, torch.get_num_threads() // seat.size))
    team = Team.start(path, config)
    try:
        ground = lay_ground(path, config, device, seat=seat, agree=team.agree_budget)
        group = team.connect(device, plan_digest(ground.memory, ground.demand.chunk_tokens))
        seat.reduction.connect(group.all_reduce)
        parts = _assemble(ground, team)
        team.await_ready()
        if decodes_in_graphs(config, device):
            parts.runner.capture(config.max_num_seqs)
            parts.runner.compile_draw()
    except BaseException:
        team.close()
        raise
    return parts


def _warn_of_short_contexts(ground: Ground) -> None:
    """Say it where next to no request will fit, and which settings take the room."""
    memory, demand, config = ground.memory, ground.demand, ground.config
    if memory.max_model_len >= min(_SHORT_CONTEXT, demand.max_model_len):
        return
    logger.warning(
        "contexts have %d tokens at most, of %d: that is all that fits in the memory budget of %s, "
        "of which the workspace takes %s: lower --max-num-batched-tokens (%d) or --max-num-seqs "
        "(%d), or raise --memory-budget",
        memory.max_model_len,
        demand.max_model_len,
        format_bytes(memory.budget),
        format_bytes(memory.workspace),
        demand.chunk_tokens,
        config.max_num_seqs,
    )


def _assemble(ground: Ground, team: Team | None) -> Parts:
    """Bring the experts in and join everything; the first of several ranks leads a team."""
    config, source, skeleton = ground.config, ground.loaded.source, ground.loaded.skeleton
    _warn_of_short_contexts(ground)
    tokenizer = load_tokenizer(source.path)
    trace = TraceWriter(config.trace)
    try:
        weights = _load_weights(ground, trace, team)
    except BaseException:
        trace.close()
        raise
    table = weights.table
    scheduler = Scheduler(
        ground.kv,
        ground.pool,
        weights.precision,
        config.max_num_seqs,
        ground.demand.chunk_tokens,
        (lambda: UNQUANTIZED) if table is None else table.tag,
    )
    make_runner = ModelRunner if team is None else partial(LeadRunner, team=team)
    return Parts(
        model_name=source.model_name,
        artifact_hash=source.artifact_hash,
        stated_model_len=ground.demand.max_model_len,
        skeleton=skeleton,
        tokenizer=tokenizer,
        memory=ground.memory,
        arena=ground.arena,
        pool=ground.pool,
        kv=ground.kv,
        table=table,
        store=weights.store,
        mover=weights.mover,
        quality=weights.quality,
        precision=weights.precision,
        scheduler=scheduler,
        runner=make_runner(skeleton, weights.experts, ground.kv, tokenizer.vocab_size),
        trace=trace,
        team=team,
        share=share_of(source),
    )


def _load_weights(ground: Ground, trace: TraceWriter, team: Team | None) -> _Weights:
    """Bring the experts in, unquantized or at their first widths."""
    config, skeleton, device = ground.config, ground.loaded.skeleton, ground.arena.pages.device
    source, pool = ground.loaded.source, ground.pool
    fixed = FixedPrecision() if team is None else LeadFixed(team)
    if ground.loaded.dense is not None:
        dense = DenseExperts(ground.loaded.dense, skeleton.activations, skeleton.biases)
        return _Weights(by_rank(dense, source, None, device), fixed)
    make_table = WeightPageTable if team is None else partial(LeadTable, team=team)
    make_mover = Mover if team is None else partial(LeadMover, team=team)
    store = ground.plane_store()
    table = make_table(source.geometry, ground.memory.layouts, ground.arena, pool, store)
    mover = make_mover(ground.arena, store, **ground.mover_settings())
    counter = quality = None
    share = share_of(source)
    if config.policy.kind in ("adaptive", "replay"):
        counter = RoutingCounter(source.geometry if share is None else share.whole, device)
        quality = make_quality(source, table, config.planner, counter, device, share)
    precision = start_precision(
        source, config, ground.demand, ground.memory, table, mover, pool, quality, trace, fixed
    )
    whole = share is not None and share.placed is not None
    paged = PagedExperts(
        table,
        ground.arena,
        skeleton.activations,
        skeleton.biases,
        source.lut_dtype,
        None if whole else counter,
        ground.widths,
        None if share is None else share.whole.experts,
    )
    experts = by_rank(paged, source, counter, device)
    return _Weights(experts, precision, table, store, mover, quality)
