"""Decode speed and bytes of precision policies side by side: batch sizes, contexts, in one run.

For each policy one engine; in it each batch size and context is a cell:

    prompts     real ones, as long as the whole batch has at most so many tokens: time to the first
    fill        contexts are put into the cache without computing them (`filling`)
    steps       decode steps, each timed as its caller sees it
    floor       bytes that such a step reads, over the speed of a copy measured in this run

`adaptive:<b>` plans the widths of its blocks within the bytes that uniform widths of b bits take:
the rest of the arena is ballast. All it needs for the measured steps is set aside beforehand, so
that the bytes of its weights stay those.
"""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pw.config import EngineConfig, PrecisionPolicy
from pw.engine import Engine
from pw.engine.request import SamplingParams
from pw.errors import BudgetError, ConfigError, PwError
from pw.evaluation.bench.filling import Ballast, fill
from pw.evaluation.bench.floor import copy_bandwidth, step_bytes
from pw.evaluation.bench.tables import at_equal_bytes, line, speedups

_SETTLE = 40  # steps before the measured ones: planes rest, and contexts grow alike in all cells
_REST = 12  # steps behind the measured ones
_REPLAYS = 20
_LATE = "no time left"
_TINY = 1e-9  # a watermark of no page


@dataclass(frozen=True)
class Matrix:
    """Which cells, and how they are measured."""

    policies: Sequence[str] = (
        "dense",
        "static:6",
        "static:4",
        "static:3",
        "adaptive:4",
        "adaptive:3",
    )
    batches: Sequence[int] = (1, 4, 8, 32, 64)
    contexts: Sequence[int] = (1024, 8192)
    steps: int = 100  # measured
    prompt_tokens: int = 16384  # of real prompts of a batch, at most
    most_tokens: int = 1 << 20  # of a cell's contexts together: larger ones are not measured
    seconds: float = math.inf  # after which no cell is begun

    def __post_init__(self) -> None:
        if not self.policies or min((*self.batches, *self.contexts, self.steps, 1)) < 1:
            raise ConfigError("policies, batches, contexts and steps must be at least 1")
        for policy in self.policies:
            parse_policy(policy)

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Batch size and context of each cell, short contexts first."""
        return [
            (batch, context)
            for context in sorted(self.contexts)
            for batch in sorted(self.batches)
            if batch * context <= self.most_tokens
        ]

    @property
    def tokens(self) -> int:
        """Tokens that each sequence of a cell makes at most."""
        return _SETTLE + self.steps + self.steps // 4 + _REST


def parse_policy(text: str) -> tuple[PrecisionPolicy, int | None]:
    """A policy, and for `adaptive:<b>` the uniform width whose bytes it has.

    Raises:
        ConfigError: It is none of `dense`, `static:<b>`, `adaptive:<b>`.
    """
    kind, _, bits = text.partition(":")
    if kind == "adaptive" and bits.isdigit():
        PrecisionPolicy.parse(f"static:{bits}")
        return PrecisionPolicy("adaptive"), int(bits)
    if text != "dense" and not (kind == "static" and bits.isdigit()):
        raise ConfigError(
            f"not a policy of the comparison: `{text}`", "use dense, static:3, adaptive:3"
        )
    return PrecisionPolicy.parse(text), None


def run_matrix(
    folder: Path,
    config: EngineConfig,
    matrix: Matrix,
    advance: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure all cells.

    Args:
        folder: An artifact, or what stands for dummy weights.
        config: Of the engines, but for the policy; no prefix cache.
        matrix: What to measure.
        advance: Told each cell when it is done.
    """
    tokens = matrix.tokens
    config = replace(
        config,
        enable_prefix_caching=False,
        max_num_seqs=max(matrix.batches),
        max_model_len=max(matrix.contexts) + tokens,
        planner=replace(
            config.planner, low_watermark=0.0, high_watermark=_TINY, forecast_steps=tokens
        ),
    )
    cells: list[dict[str, Any]] = []
    bandwidth, ends = None, time.monotonic() + matrix.seconds
    for group in _by_engine(matrix.policies):
        if time.monotonic() > ends:
            cells += [{"policy": policy, "left_out": _LATE} for policy in group]
            continue
        engine = _start(folder, config, group[0], cells, matrix, advance)
        if engine is None:
            continue
        bandwidth = bandwidth or copy_bandwidth(engine._parts.arena.pages.device)
        ballast = Ballast(engine)
        for policy, (batch, context) in itertools.product(group, matrix.shapes):
            cell = _Cell(engine, ballast, policy, batch, context, matrix)
            late = time.monotonic() > ends
            cells.append(cell.name | {"left_out": _LATE} if late else cell.measure(bandwidth))
            advance(line(cells[-1]))
            del cell
        _end(engine)
        del engine, ballast
        _collect()
    return {
        "copy_bandwidth_GB_s": (bandwidth or 0.0) / 1e9,
        "cells": cells,
        "speedups_over_dense": speedups(cells),
        "adaptive_over_uniform": at_equal_bytes(cells),
    }


def _by_engine(policies: Iterable[str]) -> list[list[str]]:
    """Policies that share an engine: adaptive ones, most bytes first (planes are only given up)."""
    groups: dict[str, list[str]] = {}
    for policy in policies:
        kind = policy.partition(":")[0]
        groups.setdefault(kind if kind == "adaptive" else policy, []).append(policy)
    return [sorted(group, reverse=True) for group in groups.values()]


def _start(
    folder: Path,
    config: EngineConfig,
    policy: str,
    cells: list[dict[str, Any]],
    matrix: Matrix,
    advance: Callable[[str], None],
) -> Engine | None:
    """An engine that has computed a prompt of each length; None, and a cell that says why not."""
    started = time.perf_counter()
    try:
        engine = Engine.from_artifact(folder, replace(config, policy=parse_policy(policy)[0]))
    except BudgetError as error:
        cells.append({"policy": policy, "left_out": str(error)})
        advance(line(cells[-1]))
        return None
    for context in matrix.contexts:
        _first_tokens(engine, 1, min(context, matrix.prompt_tokens), seed=-1)
    advance(f"{policy}: ready in {time.perf_counter() - started:.1f} s")
    return engine


def _end(engine: Engine) -> None:
    engine._parts.runner.release()
    engine.close()


def _collect() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class _Cell:
    """A policy at a batch size and a context."""

    def __init__(
        self,
        engine: Engine,
        ballast: Ballast,
        policy: str,
        batch: int,
        context: int,
        matrix: Matrix,
    ) -> None:
        self._engine, self._ballast, self._matrix = engine, ballast, matrix
        self._policy, self._batch, self._context = policy, batch, context
        self.name = {"policy": policy, "batch": batch, "context": context}

    def measure(self, bandwidth: float) -> dict[str, Any]:
        """The figures; why there are none, where the contexts do not fit."""
        name, engine, matrix = self.name, self._engine, self._matrix
        try:
            self._set_bytes()
            first = None
            if self._batch * self._context <= matrix.prompt_tokens:
                _first_tokens(engine, self._batch, self._context, 1000 + self._batch)  # compiles
                first = _first_tokens(engine, self._batch, self._context, self._batch)
            prompts = _prompts(engine, self._batch, self._context, seed=0)
            names = fill(engine, prompts, matrix.tokens)
        except PwError as error:
            for request in list(engine._sequences):
                engine.abort(request)
            return name | {"left_out": str(error)}
        _timed(engine, _SETTLE)
        times = _timed(engine, matrix.steps)
        status = engine.status()
        in_turn = _in_turn(engine, max(1, matrix.steps // 4))
        device = _device_milliseconds(engine, self._batch)
        read = step_bytes(engine)
        for request in names:
            engine.abort(request)
        median = float(np.percentile(times, 50))
        floor = read.total / bandwidth * 1e3
        return name | {
            "tokens_per_second": self._batch * len(times) / (sum(times) / 1e3),
            "itl_p50_ms": median,
            "itl_p99_ms": float(np.percentile(times, 99)),
            "in_turn_p50_ms": None if in_turn is None else float(np.percentile(in_turn, 50)),
            "device_ms": device,
            "ttft_ms": None if first is None else first[0],
            "ttft_last_ms": None if first is None else first[1],
            "mean_bits": status.mean_bits,
            "blocks_by_bits": status.blocks_by_bits,
            "moves_in_flight": status.moves_in_flight,
            "experts_read": read.experts_read,
            "read_bytes": asdict(read) | {"total": read.total},
            "floor_ms": floor,
            "over_floor": median / floor,
            "bytes": asdict(status.bytes),
        }

    def _set_bytes(self) -> None:
        """Leave an adaptive engine the bytes of a uniform width beside the cell's KV."""
        _, bits = parse_policy(self._policy)
        if bits is None:
            return
        parts = self._engine._parts
        assert parts.table is not None
        cost = parts.table.cost_bytes()[:, bits - parts.table.min_bits].sum()
        weights = int(cost) // parts.arena.page_bytes
        longest = self._context + self._matrix.tokens - 1
        self._ballast.leave(weights + self._batch * parts.kv.pages_for_tokens(longest) + 1)


def _prompts(engine: Engine, batch: int, context: int, seed: int) -> list[list[int]]:
    random = np.random.default_rng([seed + 1, batch, context])
    vocabulary = engine.tokenizer.vocab_size
    return random.integers(vocabulary, size=(batch, context)).tolist()  # type: ignore[no-any-return]


def _first_tokens(engine: Engine, batch: int, context: int, seed: int) -> tuple[float, float]:
    """Milliseconds to the first tokens of requests that arrive together: mean, and the last."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    prompts = _prompts(engine, batch, context, seed)
    started = time.perf_counter()
    for number, prompt in enumerate(prompts):
        engine.add_request(f"prompt-{number}", prompt, params)
    times = []
    while engine.has_work():
        for output in engine.step():
            if output.error is not None:
                raise PwError(f"a prompt of the benchmark failed: {output.error}")
            times.append((time.perf_counter() - started) * 1e3)
    return float(np.mean(times)), times[-1]


def _timed(engine: Engine, steps: int) -> list[float]:
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        engine.step()
        times.append((time.perf_counter() - started) * 1e3)
    return times


def _in_turn(engine: Engine, steps: int) -> list[float] | None:
    """The same where each step is launched when the last has been read; None where all are."""
    launcher = engine._launcher
    if not launcher._overlaps:
        return None
    launcher._overlaps = False
    try:
        engine.step()  # reads the one on its way
        return _timed(engine, steps)
    finally:
        launcher._overlaps = True


def _device_milliseconds(engine: Engine, batch: int) -> float | None:
    """Of a captured step replayed back to back, on what its last step left; None by calls."""
    steps = engine._parts.runner.steps
    if steps is None or not torch.cuda.is_available():
        return None
    run = steps.bucket(batch).run
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    with torch.inference_mode():
        run()
        begin.record()
        for _ in range(_REPLAYS):
            run()
        end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / _REPLAYS


def longest_contexts(
    folder: Path, config: EngineConfig, policies: Sequence[str], answer: int = 8
) -> list[dict[str, Any]]:
    """The longest context that each policy admits within the budget of `config`, then served."""
    found: list[dict[str, Any]] = []
    for policy in policies:
        row: dict[str, Any] = {"policy": policy, "budget": config.memory_budget}
        try:
            engine = Engine.from_artifact(
                folder, replace(config, policy=PrecisionPolicy.parse(policy), max_num_seqs=1)
            )
        except BudgetError as error:
            found.append(row | {"context": 0, "left_out": str(error)})
            _collect()
            continue
        length = engine.max_model_len
        bits = engine.status().mean_bits
        prompt = _prompts(engine, 1, length - answer, seed=0)[0]
        params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
        started = time.perf_counter()
        done = engine.generate([prompt], params)[0]
        status = engine.status()
        row |= {
            "context": length,
            "served": done.error is None and len(done.token_ids) == answer,
            "seconds": time.perf_counter() - started,
            "mean_bits_before": bits,
            "mean_bits_with_it": status.mean_bits,
            "bytes_over_budget": status.bytes_over_budget,
            "bytes": asdict(status.bytes),
        }
        found.append(row)
        _end(engine)
        del engine
        _collect()
    return found
