"""Prometheus metrics: histograms of requests, and the engine's own numbers read at scrape time.

Names end as vLLM's do, so that a dashboard is ported by its prefix. Each app has its own registry.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from pw.engine.request import EngineStatus, FinishReason, RequestOutput
from pw.serving.engine_protocol import AsyncEngineProtocol

_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5, 5, 10)
_REQUEST_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class ServingMetrics:
    """Everything `/metrics` shows.

    Args:
        engine: Asked for its status at each scrape.
        model_name: Served name, the label of every sample.
        build: Labels of `pw:build_info`: version, artifact hash, policy.
    """

    def __init__(self, engine: AsyncEngineProtocol, model_name: str, build: dict[str, str]) -> None:
        self.registry = CollectorRegistry()
        self._model = {"model_name": model_name, "engine": "0"}
        self.registry.register(EngineCollector(engine, self._model, build))
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token", _REQUEST_SECONDS
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Time between two tokens of a sequence", _TOKEN_SECONDS
        )
        self.e2e_latency = self._histogram(
            "e2e_request_latency_seconds", "Arrival to last token", _REQUEST_SECONDS
        )
        self.decode_time = self._histogram(
            "request_decode_time_seconds", "First to last token", _REQUEST_SECONDS
        )
        self.prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a sequence", _TOKENS
        )
        self.generation_tokens = self._histogram(
            "request_generation_tokens", "Generated tokens of a sequence", _TOKENS
        )
        self._success = self._counter("request_success", "Finished sequences", "finished_reason")
        self._rejected = self._counter("requests_rejected", "Refused requests", "reason")
        self._aborted = self._counter("request_aborted", "Sequences given up", "reason")
        self._http = Counter(
            "pw:http_requests",
            "HTTP requests",
            ("handler", "method", "status"),
            registry=self.registry,
        )
        self._http_seconds = Histogram(
            "pw:http_request_duration_seconds",
            "Duration of HTTP requests, streams to their end",
            ("handler", "method"),
            buckets=_REQUEST_SECONDS,
            registry=self.registry,
        )

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(
            f"pw:{name}", help_text, tuple(self._model), buckets=buckets, registry=self.registry
        )
        return histogram.labels(**self._model)

    def _counter(self, name: str, help_text: str, label: str) -> Counter:
        return Counter(f"pw:{name}", help_text, (*self._model, label), registry=self.registry)

    def succeeded(self, reason: FinishReason) -> None:
        """Count a sequence that ran to its end."""
        self._success.labels(**self._model, finished_reason=reason).inc()

    def rejected(self, reason: str) -> None:
        """Count a refused request by its error code."""
        self._rejected.labels(**self._model, reason=reason).inc()

    def aborted(self, reason: str) -> None:
        """Count a sequence that was given up."""
        self._aborted.labels(**self._model, reason=reason).inc()

    def http(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Count an HTTP request; `handler` is the route's pattern, never the client's path."""
        self._http.labels(handler, method, str(status)).inc()
        self._http_seconds.labels(handler, method).observe(seconds)

    def render(self) -> bytes:
        """The exposition in Prometheus' text format."""
        return generate_latest(self.registry)


class SequenceTimer:
    """Times one sequence from its submission; every figure is defined with zero tokens."""

    def __init__(self, metrics: ServingMetrics, prompt_tokens: int) -> None:
        self._metrics = metrics
        self._start = self._last = time.monotonic()
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0
        self.first_token_seconds: float | None = None
        self.finish_reason: FinishReason | None = None
        self.first_bits = self.last_bits = 0.0

    @property
    def seconds(self) -> float:
        """From submission to the last output."""
        return self._last - self._start

    def record(self, output: RequestOutput) -> None:
        """Note an output as it arrives."""
        now = time.monotonic()
        new_tokens = len(output.token_ids)
        if new_tokens and self.first_token_seconds is None:
            self.first_token_seconds = now - self._start
            self.first_bits = output.mean_bits
            self._metrics.time_to_first_token.observe(self.first_token_seconds)
        elif new_tokens:
            for _ in range(new_tokens):
                self._metrics.inter_token_latency.observe((now - self._last) / new_tokens)
        self._last = now
        self.last_bits = output.mean_bits
        self.completion_tokens = output.completion_tokens
        if output.finish_reason is not None:
            self._finish(output.finish_reason)

    def close(self, reason: str) -> None:
        """Count a sequence that nobody waits for any more, unless it has finished."""
        if self.finish_reason is None:
            self._last = time.monotonic()
            self._metrics.aborted(reason)

    def _finish(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        if reason in ("abort", "error"):
            self._metrics.aborted("engine" if reason == "abort" else "error")
            return
        self._metrics.succeeded(reason)
        self._metrics.e2e_latency.observe(self.seconds)
        self._metrics.decode_time.observe(self.seconds - (self.first_token_seconds or self.seconds))
        self._metrics.prompt_tokens.observe(self.prompt_tokens)
        self._metrics.generation_tokens.observe(self.completion_tokens)


class EngineCollector(Collector):
    """Turns `EngineStatus` into samples, so that no number is kept twice."""

    def __init__(
        self, engine: AsyncEngineProtocol, labels: dict[str, str], build: dict[str, str]
    ) -> None:
        self._engine = engine
        self._labels = labels
        self._build = build

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that registering does not ask an engine that has not started."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Samples of the status now."""
        status = self._engine.status()
        yield from self._gauges(status)
        yield from self._counters(status)
        yield self._family(
            GaugeMetricFamily,
            "weight_bits_mean",
            "Mean committed bits of a layer's experts",
            {str(layer): bits for layer, bits in status.layer_bits.items()},
            "layer",
        )
        yield self._family(
            GaugeMetricFamily,
            "expert_bits_blocks",
            "Expert blocks at each committed width",
            {str(bits): count for bits, count in status.blocks_by_bits.items()},
            "bits",
        )
        yield self._family(
            GaugeMetricFamily,
            "memory_bytes",
            "Bytes by class; padding is contained in planes and luts, host is outside",
            {name: size for name, size in vars(status.bytes).items() if name != "budget"},
            "class",
        )
        yield InfoMetricFamily("pw:build", "Version and policy", self._labels | self._build)
        cache = {
            "page_bytes": str(status.page_bytes),
            "pages_total": str(status.pages_total),
            "max_model_len": str(status.max_model_len),
        }
        yield InfoMetricFamily("pw:cache_config", "The arena", self._labels | cache)

    def _gauges(self, status: EngineStatus) -> Iterable[Metric]:
        kv_pages = status.pages_kv + status.pages_free
        experts = status.bytes.planes + status.bytes.luts + status.bytes.experts_dense
        last_step = time.time() - (time.monotonic() - status.last_step_time)
        for name, help_text, value in (
            ("num_requests_running", "Sequences in the batch", status.running),
            ("num_requests_waiting", "Sequences in the queue", status.waiting),
            (
                "kv_cache_usage_perc",
                "KV pages in use, of those in use or free now (0 to 1)",
                status.pages_kv / kv_pages if kv_pages else 0.0,
            ),
            ("weight_bytes_resident", "Bytes of expert weights in the budget", experts),
            (
                "weight_bytes_budget",
                "Bytes that expert weights may hold now: their pages and free ones",
                (status.pages_weights + status.pages_free) * status.page_bytes,
            ),
            (
                "kv_bytes_budget",
                "Bytes that KV may hold now: its pages and free ones",
                kv_pages * status.page_bytes,
            ),
            ("memory_bytes_budget", "Bytes of the whole budget", status.bytes.budget),
            ("memory_bytes_over_budget", "Worst seen; must be 0", status.bytes_over_budget),
            ("weight_bits_mean_all", "Mean committed bits, all layers", status.mean_bits),
            ("page_move_inflight", "Page moves under way", status.moves_in_flight),
            (
                "scheduler_last_step_timestamp_seconds",
                "Unix time of the last step, 0 before the first",
                last_step if status.last_step_time else 0.0,
            ),
        ):
            yield self._family(GaugeMetricFamily, name, help_text, {"": value})

    def _counters(self, status: EngineStatus) -> Iterable[Metric]:
        for name, help_text, value in (
            ("prompt_tokens", "Prompt tokens computed", status.prompt_tokens),
            ("generation_tokens", "Tokens generated", status.generation_tokens),
            ("num_preemptions", "Preemptions", status.preemptions),
            ("precision_transitions", "Width changes of blocks", status.transitions),
            ("plan", "Plans made", status.plans),
            ("page_move_failures", "Reads of planes that failed", status.transfer_failures),
        ):
            yield self._family(CounterMetricFamily, name, help_text, {"": value})
        yield self._family(
            CounterMetricFamily,
            "page_move_bytes",
            "Bytes of planes given up and brought back",
            {"offload": status.bytes_released, "reload": status.bytes_reloaded},
            "direction",
        )

    def _family(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        help_text: str,
        values: dict[str, float],
        label: str = "",
    ) -> Metric:
        names = (*self._labels, label) if label else tuple(self._labels)
        family = kind(f"pw:{name}", help_text, labels=names)
        for key, value in values.items():
            labels = (*self._labels.values(), key) if label else tuple(self._labels.values())
            family.add_metric(labels, value)
        return family
