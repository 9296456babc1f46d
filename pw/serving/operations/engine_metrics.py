"""The engine's own numbers as Prometheus samples, read from its status at each scrape."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from pw.engine.request import EngineStatus
from pw.serving.process.engine_protocol import AsyncEngineProtocol

_Families = Iterable[Metric]


class EngineCollector(Collector):
    """Turns `EngineStatus` into samples, so that no number is kept twice.

    Args:
        engine: Asked for its status at each scrape.
        labels: Of every sample.
        build: Further labels of `pw:build_info`.
    """

    def __init__(
        self, engine: AsyncEngineProtocol, labels: dict[str, str], build: dict[str, str]
    ) -> None:
        self._engine = engine
        self._labels = labels
        self._build = build

    def describe(self) -> _Families:
        """Nothing, so that registering does not ask an engine that has not started."""
        return ()

    def collect(self) -> _Families:
        """Samples of the status now."""
        status = self._engine.status()
        yield from self._info(status)
        yield from self._requests(status)
        yield from self._memory(status)
        yield from self._precision(status)
        yield from self._moves(status)
        yield from self._steps(status)

    def _info(self, status: EngineStatus) -> _Families:
        build = {**self._build, "policy": status.policy}
        yield InfoMetricFamily("pw:build", "Version, artifact, policy", self._labels | build)
        cache = {
            "page_bytes": str(status.page_bytes),
            "pages_total": str(status.pages_total),
            "max_model_len": str(status.max_model_len),
        }
        yield InfoMetricFamily("pw:cache_config", "The arena", self._labels | cache)
        yield self._gauge(
            "engine_up", "1, or 0 once the engine has failed", not self._engine.failed
        )

    def _requests(self, status: EngineStatus) -> _Families:
        yield self._gauge("num_requests_running", "Sequences in the batch", status.running)
        yield self._gauge("num_requests_waiting", "Sequences in the queue", status.waiting)
        yield self._counter("prompt_tokens", "Prompt tokens computed", status.prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated", status.generation_tokens)
        yield self._counter(
            "num_preemptions", "Sequences put back to be computed again", status.preemptions
        )
        yield self._counter(
            "prefix_cache_queries",
            "Prompt tokens looked up in the prefix cache",
            status.prefix_cache_queries,
        )
        yield self._counter(
            "prefix_cache_hits", "Prompt tokens found in the prefix cache", status.prefix_cache_hits
        )
        yield self._counter(
            "nonfinite_logits", "Sequences failed by NaN or infinite logits", status.nonfinite
        )

    def _memory(self, status: EngineStatus) -> _Families:
        page, held = status.page_bytes, status.bytes
        kv_pages = status.pages_kv + status.pages_free
        yield self._gauge(
            "kv_cache_usage_perc",
            "KV pages in use, of those in use or free now (0 to 1)",
            status.pages_kv / kv_pages if kv_pages else 0.0,
        )
        yield self._gauge(
            "kv_bytes_budget",
            "Bytes that KV may hold now: its pages and free ones",
            kv_pages * page,
        )
        yield self._gauge(
            "weight_bytes_resident",
            "Bytes of expert weights in the budget",
            held.planes + held.luts + held.experts_dense,
        )
        yield self._gauge(
            "weight_bytes_budget",
            "Bytes that expert weights may hold now: their pages and free ones",
            (status.pages_weights + status.pages_free) * page,
        )
        yield self._gauge("memory_bytes_budget", "Bytes of the whole budget", held.budget)
        yield self._gauge(
            "memory_bytes_over_budget", "Worst seen; must be 0", status.bytes_over_budget
        )
        yield self._gauges(
            "memory_bytes",
            "Bytes by class; padding is contained in planes and luts, host is outside",
            "class",
            {name: size for name, size in vars(held).items() if name != "budget"},
        )
        if status.ranks:
            yield self._by_rank(status)

    def _by_rank(self, status: EngineStatus) -> Metric:
        labels = (*self._labels, "rank", "class")
        family = GaugeMetricFamily("pw:rank_memory_bytes", "The same of each rank", labels=labels)
        for rank, held in enumerate(status.ranks):
            for name, size in vars(held).items():
                if name != "budget":
                    family.add_metric((*self._labels.values(), str(rank), name), size)
        return family

    def _precision(self, status: EngineStatus) -> _Families:
        yield self._gauge(
            "weight_bits_mean_all", "Mean committed bits, all layers", status.mean_bits
        )
        yield self._gauges(
            "weight_bits_mean",
            "Mean committed bits of a layer's experts",
            "layer",
            status.layer_bits,
        )
        yield self._gauges(
            "expert_bits_blocks",
            "Expert blocks at each committed width",
            "bits",
            status.blocks_by_bits,
        )
        if status.experts_never_routed is not None:
            yield self._gauge(
                "expert_never_routed",
                "Experts, of all layers, that no token has been routed to",
                status.experts_never_routed,
            )
        yield self._counter("precision_transitions", "Width changes of blocks", status.transitions)
        yield self._counters(
            "plan", "Plans made, by what made them necessary", "trigger", status.plans_by_trigger
        )
        yield self._summary(
            "plan_seconds", "Time in the planner", status.plan_runs, status.plan_seconds_total
        )
        damage = status.plan_history[-1].get("damage", 0.0) if status.plan_history else 0.0
        yield self._gauge(
            "plan_damage_estimate",
            "Damage predicted by the latest plan, nats a token; negative when planes came back",
            float(damage) if isinstance(damage, int | float) else 0.0,
        )

    def _moves(self, status: EngineStatus) -> _Families:
        yield self._counters(
            "page_move_bytes",
            "Bytes of planes given up and brought back",
            "direction",
            {"offload": status.bytes_released, "reload": status.bytes_reloaded},
        )
        yield self._summary(
            "page_move_seconds",
            "From the start of a raise to its commit",
            status.moves,
            status.move_seconds_total,
        )
        yield self._gauge("page_move_inflight", "Raises under way", status.moves_in_flight)
        yield self._counter(
            "page_move_failures", "Planes or LUTs that could not be read", status.transfer_failures
        )

    def _steps(self, status: EngineStatus) -> _Families:
        last_step = time.time() - (time.monotonic() - status.last_step_time)
        yield self._gauge(
            "scheduler_last_step_timestamp_seconds",
            "Unix time of the last step, 0 before the first",
            last_step if status.last_step_time else 0.0,
        )
        buckets, seen = [], 0
        for bound, steps in sorted(status.steps_by_tokens.items()):
            seen += steps
            buckets.append((str(float(bound)), seen))
        family = HistogramMetricFamily(
            "pw:iteration_tokens_total", "Tokens of a forward step", labels=tuple(self._labels)
        )
        family.add_metric(
            tuple(self._labels.values()),
            buckets=[*buckets, ("+Inf", seen)],
            sum_value=status.step_tokens,
        )
        yield family

    # -- families of one name ----------------------------------------------------------------

    def _gauge(self, name: str, about: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"pw:{name}", about, labels=tuple(self._labels))
        family.add_metric(tuple(self._labels.values()), value)
        return family

    def _gauges(
        self, name: str, about: str, label: str, values: Mapping[int, float] | Mapping[str, float]
    ) -> Metric:
        family = GaugeMetricFamily(f"pw:{name}", about, labels=(*self._labels, label))
        for key, value in values.items():
            family.add_metric((*self._labels.values(), str(key)), value)
        return family

    def _counter(self, name: str, about: str, value: float) -> Metric:
        family = CounterMetricFamily(f"pw:{name}", about, labels=tuple(self._labels))
        family.add_metric(tuple(self._labels.values()), value)
        return family

    def _counters(self, name: str, about: str, label: str, values: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(f"pw:{name}", about, labels=(*self._labels, label))
        for key, value in values.items():
            family.add_metric((*self._labels.values(), key), value)
        return family

    def _summary(self, name: str, about: str, count: int, total: float) -> Metric:
        family = SummaryMetricFamily(f"pw:{name}", about, labels=tuple(self._labels))
        family.add_metric(tuple(self._labels.values()), count_value=count, sum_value=total)
        return family
