"""Puts an engine together: artifact, model, budget, arena, planner, scheduler."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pw.blocks import ExpertGeometry
from pw.config import EngineConfig
from pw.engine.adaptive import AdaptivePrecision
from pw.engine.experts import DenseExperts, PagedExperts, RoutedExperts, RoutingCounter
from pw.engine.precision import FixedPrecision, Precision, ReplayedPrecision
from pw.engine.quality import Quality, make_quality
from pw.engine.runner import ModelRunner
from pw.engine.scheduler import Scheduler
from pw.engine.statistics import statistics_bytes
from pw.engine.trace import FORMAT, Replay, TraceWriter, read_replay
from pw.errors import BudgetError, ConfigError, ModelError, StoreError
from pw.memory.arena import Arena
from pw.memory.budget import Demand, MemoryPlan, plan_memory, workspace_bytes
from pw.memory.host_store import HostPlaneStore
from pw.memory.kv_cache import KvCache
from pw.memory.mover import CHUNK_BYTES, Mover
from pw.memory.page_table import WeightPageTable
from pw.memory.pool import PagePool
from pw.models.checkpoint import Checkpoint
from pw.models.resolve import resolve_model
from pw.models.skeleton import Skeleton, load_skeleton
from pw.models.tokenizer import Tokenizer, load_tokenizer
from pw.planning.bits_file import read_bits
from pw.planning.planner import allocate
from pw.store.artifact import Artifact
from pw.store.verify import verify

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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


def build_parts(path: Path, config: EngineConfig) -> Parts:
    """Load an artifact and divide the memory budget. See `Engine.from_artifact`."""
    replayed = config.policy.path if config.policy.kind == "replay" else None
    if config.trace and replayed and config.trace.resolve() == replayed.resolve():
        raise ConfigError(f"the trace would overwrite what it replays: `{config.trace}`")
    artifact = _open_artifact(path)
    device = _device(config)
    budget = _budget(config, device)
    dtype = _dtype(config.dtype, artifact.lut_dtype if device.type != "cpu" else torch.float32)
    skeleton = load_skeleton(Checkpoint.open(path), dtype, device)
    dense = _load_dense_experts(artifact, config, device) if config.policy.kind == "dense" else None
    demand = _demand(artifact, skeleton, config, dense)
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
        artifact.geometry.blocks,
    )
    trace = TraceWriter(config.trace)
    table = store = mover = quality = None
    precision: Precision = FixedPrecision()
    experts: RoutedExperts
    if dense is not None:
        experts = DenseExperts(dense, skeleton.activations, skeleton.biases)
    else:
        store = HostPlaneStore(
            artifact, memory.layouts, config.offload_cpu_memory, device.type == "cuda"
        )
        table = WeightPageTable(artifact.geometry, memory.layouts, arena, pool, store)
        mover = Mover(arena, store)
        counter = None
        if config.policy.kind in ("adaptive", "replay"):
            counter = RoutingCounter(artifact.geometry, device)
            quality = make_quality(artifact, table, config.planner, counter, device)
        precision = _start_precision(
            artifact, config, demand, memory, table, mover, pool, quality, trace
        )
        experts = PagedExperts(
            table, arena, skeleton.activations, skeleton.biases, artifact.lut_dtype, counter
        )
    scheduler = Scheduler(kv, pool, precision, config.max_num_seqs, config.max_num_batched_tokens)
    tokenizer = load_tokenizer(path)
    return Parts(
        model_name=artifact.manifest.model.name,
        artifact_hash=artifact.artifact_hash,
        stated_model_len=demand.max_model_len,
        skeleton=skeleton,
        tokenizer=tokenizer,
        memory=memory,
        arena=arena,
        pool=pool,
        kv=kv,
        table=table,
        store=store,
        mover=mover,
        quality=quality,
        precision=precision,
        scheduler=scheduler,
        runner=ModelRunner(skeleton, experts, kv, tokenizer.vocab_size),
        trace=trace,
    )


def _device(config: EngineConfig) -> torch.device:
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError("no CUDA device is to be had: `--device cuda`", "use `--device cpu`")
    return torch.device(config.device)


def _dtype(name: str, automatic: torch.dtype) -> torch.dtype:
    if name == "auto":
        return automatic
    if name not in _DTYPES:
        raise ConfigError(f"unknown dtype: `{name}`", f"use auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _budget(config: EngineConfig, device: torch.device) -> int:
    """Bytes for weights, KV and workspace together; free memory before anything is loaded."""
    if config.memory_budget is not None:
        return config.memory_budget
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf(pages)
    return int(free * config.gpu_memory_utilization)


def _demand(
    artifact: Artifact,
    skeleton: Skeleton,
    config: EngineConfig,
    dense: list[tuple[Tensor, Tensor]] | None,
) -> Demand:
    low, high = _bounds(artifact, config)
    stated = config.max_model_len or skeleton.max_model_len
    if stated > skeleton.max_model_len:
        raise ConfigError(
            f"max_model_len is {stated} but the model states {skeleton.max_model_len} tokens"
        )
    workspace = workspace_bytes(
        artifact.geometry,
        skeleton.kv,
        tokens=config.max_num_batched_tokens,
        sequences=config.max_num_seqs,
        vocabulary=skeleton.vocab_size,
        widest=_widest(skeleton.model),
        itemsize=skeleton.dtype.itemsize,
    )
    if config.policy.kind in ("adaptive", "replay"):
        each = statistics_bytes(config.planner.residual, artifact.geometry)
        workspace += each * min(config.max_num_seqs, config.max_num_batched_tokens)
    if skeleton.device.type == "cuda":
        workspace += CHUNK_BYTES  # of the mover, between host and arena
    return Demand(
        geometry=artifact.geometry,
        kv=skeleton.kv,
        kv_dtype=_dtype(config.kv_cache_dtype, skeleton.dtype),
        dense=skeleton.dense_bytes,
        experts_dense=sum(t.numel() * t.element_size() for pair in dense or () for t in pair),
        workspace=workspace,
        # scores of one query on each thread
        context_scratch=4 * skeleton.model.config.num_attention_heads * torch.get_num_threads(),
        least_bits=low,
        most_bits=high,
        stored_bits=(artifact.min_bits, artifact.max_bits),
        max_model_len=stated,
        max_num_seqs=config.max_num_seqs,
        chunk_tokens=config.max_num_batched_tokens,
        page_bytes=config.page_bytes,
    )


def _widest(model: torch.nn.Module) -> int:
    """Most outputs of the linear maps of one module, the output head left out."""
    return max(
        sum(
            child.weight.shape[0]
            for name, child in module.named_children()
            if isinstance(child, torch.nn.Linear) and name != "lm_head"
        )
        for module in model.modules()
    )


def _bounds(
    artifact: Artifact, config: EngineConfig
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Least and most bits [n] of each block that the policy can reach.

    Raises:
        ConfigError: The artifact does not have them.
    """
    stored, policy = (artifact.min_bits, artifact.max_bits), config.policy
    if policy.kind == "static" and policy.path is not None:
        bits = read_bits(policy.path, artifact.geometry, *stored)
        return bits, bits
    low, high = config.min_bits or stored[0], config.max_bits or stored[1]
    if policy.bits is not None:
        low = high = policy.bits
    if not stored[0] <= low <= high <= stored[1]:
        raise ConfigError(
            f"bits {low} to {high} are asked for, the artifact has {stored[0]} to {stored[1]}"
        )
    every = np.ones(artifact.geometry.blocks, dtype=np.int64)
    return low * every, high * every


def _start_precision(
    artifact: Artifact,
    config: EngineConfig,
    demand: Demand,
    memory: MemoryPlan,
    table: WeightPageTable,
    mover: Mover,
    pool: PagePool,
    quality: Quality | None,
    trace: TraceWriter,
) -> Precision:
    """Load the first widths and make who changes them."""
    policy = config.policy
    bounds = (int(demand.least_bits.min()), int(demand.most_bits.max()))
    precision: Precision = FixedPrecision()
    bits = demand.most_bits  # of the static policies
    if policy.kind == "replay":
        assert policy.path is not None
        assert quality is not None
        replay = read_replay(policy.path)
        _check_replay(replay, artifact, memory)
        bits = np.array(replay.bits, dtype=np.int64)
        precision = ReplayedPrecision(table, pool, mover, trace, quality, bounds, replay)
    elif policy.kind == "adaptive":
        assert quality is not None
        bits = _first_bits(quality, config, bounds, memory, artifact.geometry)
        precision = AdaptivePrecision(table, pool, mover, trace, quality, bounds, config.planner)
    table.load(bits)
    trace.write(
        "start",
        format=FORMAT,
        artifact=artifact.artifact_hash,
        policy=str(policy),
        budget=memory.budget,
        pages=memory.num_pages,
        page_bytes=memory.page_bytes,
        bits=bits.tolist(),
    )
    return precision


def _open_artifact(path: Path) -> Artifact:
    """An artifact whose every file but planes and LUTs has been read and compared; those are
    checked as they are loaded.

    Raises:
        StoreError: A byte is not as it was written.
    """
    artifact = Artifact.open(path)
    found = verify(artifact, payload=False)
    if found:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise StoreError(
            f"artifact is damaged: {found[0]}{more}: `{path}`",
            f"`pw inspect --verify {path}` lists all; make it again or copy it again",
        )
    return artifact


def _check_replay(replay: Replay, artifact: Artifact, memory: MemoryPlan) -> None:
    """Refuse a trace that this engine cannot follow.

    Raises:
        ConfigError: Another artifact, or too few pages.
    """
    if replay.artifact != artifact.artifact_hash:
        raise ConfigError(
            f"the trace was recorded with another artifact: {replay.artifact[:12]}, "
            f"this one is {artifact.artifact_hash[:12]}"
        )
    if replay.page_bytes != memory.page_bytes or replay.pages > memory.num_pages:
        raise ConfigError(
            f"the trace was recorded with {replay.pages} pages of {replay.page_bytes} bytes, "
            f"this memory budget gives {memory.num_pages} of {memory.page_bytes}",
            "give the budget and the limits of the recorded run",
        )
    geometry, widths = artifact.geometry, artifact.manifest.widths
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


def _load_dense_experts(
    artifact: Artifact, config: EngineConfig, device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """Unquantized experts of every MoE layer, in the checkpoint's dtype.

    Raises:
        ConfigError: The checkpoint is gone, or not the one the artifact was made from.
    """
    record = artifact.manifest.model
    source = record.source if config.checkpoint is None else str(config.checkpoint)
    try:
        checkpoint = Checkpoint.open(resolve_model(source))
    except ModelError as error:
        raise ConfigError(
            f"policy dense needs the original checkpoint: {error.message}",
            "name it with --checkpoint",
        ) from error
    if checkpoint.fingerprint() != dict(record.files):
        raise ConfigError(
            f"not the checkpoint that the artifact was made from: `{source}`",
            "name the right one with --checkpoint",
        )
    geometry = artifact.geometry
    layers = []
    for layer in geometry.layers:
        keys = [key for key in geometry.keys() if key.layer == layer]
        pair = [
            torch.stack([checkpoint.expert_weight(key) for key in keys if key.module == module])
            for module in ("gate_up", "down")
        ]
        layers.append((pair[0].to(device), pair[1].to(device)))
    return layers
