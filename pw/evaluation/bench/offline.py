"""Throughput and latency of an engine in this process, without a server in between."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pw.engine import Engine
from pw.engine.request import SamplingParams
from pw.errors import ConfigError, PwError
from pw.evaluation.bench.metrics import Timing, distribution, summarize
from pw.evaluation.bench.timing import step_tokens
from pw.evaluation.bench.workload import Request


def throughput(
    engine: Engine,
    requests: Sequence[Request],
    *,
    ignore_eos: bool,
    concurrency: int,
    percentiles: Sequence[float],
    advance: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """Run all requests as fast as they go.

    Args:
        engine: The engine.
        requests: What to run.
        ignore_eos: Make all tokens asked for.
        concurrency: Requests in the engine at most: its queue is bounded.
        percentiles: Of the latencies.
        advance: Told how many requests have ended.

    Raises:
        ConfigError: A prompt does not fit the engine's context.
        PwError: A request failed.
    """
    prepared = [_tokens(engine, request) for request in requests]
    _warm_up(engine)
    timings: dict[str, Timing] = {}
    running: set[str] = set()
    later = deque(enumerate(zip(prepared, requests, strict=True)))
    started = time.perf_counter()
    while later or running:
        while later and len(running) < concurrency:
            number, (prompt, request) = later.popleft()
            name = f"bench-{number}"
            engine.add_request(name, prompt, _params(request, ignore_eos))
            running.add(name)
            timings[name] = Timing(time.perf_counter(), input_tokens=len(prompt))
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            timings[output.request_id].take(now, output)
            if output.finish_reason is not None:
                running.remove(output.request_id)
                advance(1)
    duration = time.perf_counter() - started
    result = summarize(list(timings.values()), duration, percentiles=percentiles)
    if result["failed"]:
        raise PwError(f"{result['failed']} requests of the benchmark failed: {result['errors']}")
    return result | engine_figures(engine)


def latency(
    engine: Engine,
    *,
    input_len: int,
    output_len: int,
    batch_size: int,
    warmup: int,
    iterations: int,
    percentiles: Sequence[float],
    seed: int,
    advance: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """Time of a batch of equal requests that start together, over and over.

    Each iteration has prompts of its own: the prefix cache does not answer.
    """
    rng = np.random.default_rng(seed)
    vocabulary = engine.tokenizer.vocab_size
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    seconds, firsts = [], []
    for iteration in range(warmup + iterations):
        prompts = rng.integers(vocabulary, size=(batch_size, input_len)).tolist()
        first, whole = _run_batch(engine, prompts, params)
        advance(1)
        if iteration >= warmup:
            firsts.append(first)
            seconds.append(whole)
    milliseconds = [value * 1e3 for value in seconds]
    steps = [(s - f) / max(output_len - 1, 1) * 1e3 for s, f in zip(seconds, firsts, strict=True)]
    return {
        "batch_size": batch_size,
        "input_len": input_len,
        "output_len": output_len,
        "iterations": iterations,
        "latencies": seconds,
        "output_throughput": batch_size * output_len / float(np.mean(seconds)),
        **distribution(milliseconds, "latency", percentiles),
        **distribution([value * 1e3 for value in firsts], "ttft", percentiles),
        **distribution(steps, "tpot", percentiles),
        **engine_figures(engine),
    }


def _run_batch(
    engine: Engine, prompts: list[list[int]], params: SamplingParams
) -> tuple[float, float]:
    """Seconds to the last first token and to the end."""
    for number, prompt in enumerate(prompts):
        engine.add_request(f"bench-{number}", prompt, params)
    waiting, first = {f"bench-{number}" for number in range(len(prompts))}, 0.0
    started = time.perf_counter()
    while engine.has_work():
        for output in engine.step():
            if output.error is not None:
                raise PwError(f"a request of the benchmark failed: {output.error}")
            waiting.discard(output.request_id)
        if not waiting and not first:
            first = time.perf_counter() - started
    return first, time.perf_counter() - started


def engine_figures(engine: Engine) -> dict[str, Any]:
    """At which bits and bytes the figures were measured."""
    status = engine.status()
    return {
        "policy": status.policy,
        "mean_bits": status.mean_bits,
        "preemptions": status.preemptions,
        "max_num_batched_tokens": step_tokens(engine),
        "bytes": status.bytes,
        "bytes_total": status.bytes.total,
    }


def _tokens(engine: Engine, request: Request) -> list[int]:
    prompt = request.prompt
    tokens = engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    if len(tokens) + request.output_len > engine.max_model_len:
        raise ConfigError(
            f"a prompt of {len(tokens)} and an answer of {request.output_len} tokens exceed "
            f"the context of {engine.max_model_len}",
            "lower the lengths, or raise --max-model-len and --memory-budget",
        )
    return tokens


def _params(request: Request, ignore_eos: bool) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=request.output_len, ignore_eos=ignore_eos)


def _warm_up(engine: Engine) -> None:
    """Compile what is compiled at first use."""
    prompt = list(range(min(8, engine.tokenizer.vocab_size)))
    engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
