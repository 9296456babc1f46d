"""Prometheus metrics of requests; the engine's stand in `pw.serving.operations.engine_metrics`.

Names end as vLLM's do, so that a dashboard is ported by its prefix. Each app has its own registry.
docs/operations.md lists them all.
"""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from pw.engine.request import FinishReason, RequestOutput
from pw.serving.operations.engine_metrics import EngineCollector
from pw.serving.process.engine_protocol import AsyncEngineProtocol

_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5, 5, 10)
_REQUEST_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class ServingMetrics:
    """Everything `/metrics` shows.

    Args:
        engine: Asked for its status at each scrape.
        model_name: Served name, the label of every sample.
        build: Labels of `pw:build_info`: version, artifact hash.
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
        self.queue_time = self._histogram(
            "request_queue_time_seconds", "Arrival to the first step", _REQUEST_SECONDS
        )
        self.prefill_time = self._histogram(
            "request_prefill_time_seconds", "First step to first token", _REQUEST_SECONDS
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
        for reason in ("stop", "length"):  # rates need a zero to start from
            self._success.labels(**self._model, finished_reason=reason)
        for reason in ("server_overloaded", "engine_unavailable"):
            self._rejected.labels(**self._model, reason=reason)
        for reason in ("client", "engine", "error"):
            self._aborted.labels(**self._model, reason=reason)
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
    """Times one sequence from its request's arrival; every figure is defined with zero tokens.

    Args:
        metrics: Told of every figure.
        prompt_tokens: Of its prompt.
        arrived: When the request came, in monotonic seconds; None: now.

    Attributes:
        prompt_tokens: Of its prompt.
        cached_tokens: Those of them found in the prefix cache.
        completion_tokens: Made so far.
        queue_seconds: In the engine's queue; None before the first token.
        first_token_seconds: From arrival; None before it.
        first_bits, last_bits: Mean committed bits with the first token and with the latest.
        least_bits: Of any block with any token; 0 before the first.
        finish_reason: None while it runs.
    """

    def __init__(
        self, metrics: ServingMetrics, prompt_tokens: int, arrived: float | None = None
    ) -> None:
        self._metrics = metrics
        self._start = self._last = time.monotonic() if arrived is None else arrived
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = self.completion_tokens = 0
        self.queue_seconds: float | None = None
        self.first_token_seconds: float | None = None
        self.finish_reason: FinishReason | None = None
        self.first_bits = self.last_bits = 0.0
        self.least_bits = 0

    @property
    def waits(self) -> bool:
        """Whether its first token is yet to come."""
        return self.first_token_seconds is None and self.finish_reason is None

    @property
    def seconds(self) -> float:
        """From arrival to the last output."""
        return self._last - self._start

    @property
    def age_seconds(self) -> float:
        """From arrival until now."""
        return time.monotonic() - self._start

    def record(self, output: RequestOutput) -> None:
        """Note an output as it arrives."""
        now = time.monotonic()
        new_tokens = len(output.token_ids)
        if new_tokens and self.first_token_seconds is None:
            self._note_first(output, now)
        elif new_tokens:
            for _ in range(new_tokens):
                self._metrics.inter_token_latency.observe((now - self._last) / new_tokens)
        self._last = now
        # An engine's last word, when it fails, knows neither tokens nor bits.
        self.last_bits = output.mean_bits or self.last_bits
        if output.min_bits:
            self.least_bits = min(self.least_bits or output.min_bits, output.min_bits)
        self.completion_tokens = max(self.completion_tokens, output.completion_tokens)
        if output.finish_reason is not None:
            self._finish(output.finish_reason)

    def _note_first(self, output: RequestOutput, now: float) -> None:
        self.first_token_seconds = now - self._start
        self.first_bits = output.mean_bits
        self.queue_seconds = output.queue_seconds
        self.cached_tokens = output.cached_tokens
        self._metrics.time_to_first_token.observe(self.first_token_seconds)
        self._metrics.queue_time.observe(output.queue_seconds)
        self._metrics.prefill_time.observe(output.prefill_seconds)

    def close(self, reason: str | None) -> None:
        """Count a sequence that nobody waits for any more, unless it has finished.

        Args:
            reason: Why it was given up; None: it never ran, do not count it.
        """
        if self.finish_reason is None:
            self._last = time.monotonic()
            if reason is not None:
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
