"""Counts and snapshots of an engine: what `/v1/pw/status`, `/metrics` and the demo show."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field, replace
from typing import Any

from pw.config import EngineConfig
from pw.engine.page_map import page_map
from pw.engine.precision.policies import FixedPrecision
from pw.engine.request import BytesByClass, EngineStatus, FinishReason
from pw.engine.start.build import Parts


@dataclass
class Counters:
    """Totals since the start."""

    finished: int = 0
    failed: int = 0
    aborted: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    nonfinite: int = 0
    bytes_over_budget: int = 0
    steps_by_tokens: collections.Counter[int] = field(default_factory=collections.Counter)
    step_tokens: int = 0

    def count_step(self, tokens: int) -> None:
        """Count a forward step of so many tokens, under the next power of two."""
        self.steps_by_tokens[1 << (tokens - 1).bit_length()] += 1
        self.step_tokens += tokens

    def count(self, reason: FinishReason) -> None:
        """Count the end of a request."""
        if reason == "error":
            self.failed += 1
        elif reason == "abort":
            self.aborted += 1
        else:
            self.finished += 1


def bytes_by_class(parts: Parts) -> BytesByClass:
    """Where every byte of the budget is now."""
    page = parts.arena.page_bytes
    weights = luts = padding = 0
    tables = parts.kv.table_bytes
    if parts.table is not None:
        weights, luts = parts.table.resident_pages(), parts.table.lut_pages()
        padding = parts.table.padding_bytes()
        tables += parts.table.table_bytes
    kv = parts.kv.used_pages
    return BytesByClass(
        planes=(weights - luts) * page,
        luts=luts * page,
        experts_dense=parts.memory.experts_dense,
        dense=parts.skeleton.dense_bytes,
        kv=kv * page,
        free=parts.pool.free_count * page,
        tables=tables,
        workspace=parts.memory.workspace,
        padding=padding,
        host=0 if parts.store is None else parts.store.bytes,
        budget=parts.memory.budget,
    )


def bytes_by_rank(parts: Parts, own: BytesByClass) -> tuple[BytesByClass, ...]:
    """The same for every rank, where there are several: pages and tables are alike on all."""
    team = parts.team
    if team is None:
        return ()
    others = zip(team.dense, team.host, strict=True)
    return (own, *(replace(own, dense=dense, host=host) for dense, host in others))


def concurrency(parts: Parts, config: EngineConfig) -> dict[str, float]:
    """Requests of the longest context that fit beside the experts at once, by the experts' widths.

    Where bits change, at the policy's most and least for every block: what runs at full precision,
    and what can run at all. `max_num_seqs` is not part of it.
    """
    table, pages = parts.table, parts.pool.num_pages
    if table is None:
        held = {"unquantized": 0}
    elif isinstance(parts.precision, FixedPrecision):
        low, high = int(table.committed.min()), int(table.committed.max())
        held = {f"{low} bits" if low == high else "mixed bits": table.resident_pages()}
    else:
        low, high = config.min_bits or table.min_bits, config.max_bits or table.max_bits
        costs = table.cost_bytes().sum(axis=0) // parts.arena.page_bytes
        held = {f"{bits} bits": int(costs[bits - table.min_bits]) for bits in (high, low)}
    each = parts.kv.pages_for_tokens(parts.memory.max_model_len)
    return {widths: max(0, pages - used) / each for widths, used in held.items()}


def precision_map(parts: Parts) -> dict[str, Any]:
    """Committed bits of every block, layer by layer, and a picture of the arena. JSON-ready.

    `gate_up` and `down` are bits by expert, `mass` is each expert's share of the router weight of
    late, None where nothing plans. With unquantized experts there are no layers.
    """
    table, quality = parts.table, parts.quality
    layers: list[dict[str, Any]] = []
    if table is not None:
        committed = table.committed if parts.share is None else parts.share.expand(table.committed)
        bits = committed.reshape(len(table.geometry.layers), -1, 2)  # of the model's experts
        mass = None if quality is None else quality.mass().round(4).tolist()
        layers = [
            {
                "layer": layer,
                "gate_up": bits[slot, :, 0].tolist(),
                "down": bits[slot, :, 1].tolist(),
                "mass": None if mass is None else mass[slot],
            }
            for slot, layer in enumerate(table.geometry.layers)
        ]
    return {"layers": layers, "pages": page_map(parts)}


def snapshot(
    parts: Parts,
    config: EngineConfig,
    counters: Counters,
    waiting: int,
    step: int,
    last_step_time: float,
) -> EngineStatus:
    """A snapshot of everything."""
    table, precision, scheduler = parts.table, parts.precision, parts.scheduler
    prefix = parts.kv.prefix
    sizes = bytes_by_class(parts)
    counters.bytes_over_budget = max(counters.bytes_over_budget, sizes.total - sizes.budget)
    page = parts.arena.page_bytes
    layers = parts.skeleton.geometry.layers
    return EngineStatus(
        step=step,
        policy=str(config.policy),
        running=len(scheduler.running),
        waiting=waiting,
        finished=counters.finished,
        failed=counters.failed,
        aborted=counters.aborted,
        preemptions=scheduler.preemptions,
        prompt_tokens=counters.prompt_tokens,
        generation_tokens=counters.generation_tokens,
        pages_total=parts.pool.num_pages,
        pages_weights=(sizes.planes + sizes.luts) // page,
        pages_kv=sizes.kv // page,
        pages_free=parts.pool.free_count,
        pages_cached=parts.pool.idle_count,
        page_bytes=page,
        mean_bits=16.0 if table is None else table.mean_bits(),
        layer_bits={}
        if table is None
        else dict(zip(layers, table.layer_bits().tolist(), strict=True)),
        blocks_by_bits={}
        if table is None
        else dict(sorted(collections.Counter(table.committed.tolist()).items())),
        moves_in_flight=0 if parts.mover is None else parts.mover.pending,
        bytes_reloaded=precision.bytes_reloaded,
        bytes_released=precision.bytes_released,
        transitions=precision.transitions,
        moves=precision.moves,
        move_seconds_total=precision.move_seconds,
        plans_by_trigger=dict(precision.plans_by_trigger),
        plan_runs=precision.plan_runs,
        plan_seconds_total=precision.plan_seconds,
        experts_never_routed=None if parts.quality is None else parts.quality.experts_never_routed,
        steps_by_tokens=dict(counters.steps_by_tokens),
        step_tokens=counters.step_tokens,
        plans=precision.plans,
        nonfinite=counters.nonfinite,
        prefix_cache_queries=0 if prefix is None else prefix.queries,
        prefix_cache_hits=0 if prefix is None else prefix.hits,
        transfer_failures=precision.failures,
        bytes_over_budget=counters.bytes_over_budget,
        max_model_len=parts.memory.max_model_len,
        last_step_time=last_step_time,
        bytes=sizes,
        ranks=bytes_by_rank(parts, sizes),
        replicated=0 if parts.team is None else parts.skeleton.ends_bytes,
        plan_history=precision.history,
    )
