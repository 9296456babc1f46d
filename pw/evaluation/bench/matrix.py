"""Decode speed and bytes of precision policies side by side: batch sizes, contexts, in one run.

For each policy one engine; in it each batch size and context is a cell:

    prompts     real ones, as long as the whole batch has at most so many tokens: time to the first
    fill        contexts are put into the cache without computing them (`filling`)
    steps       decode steps, each timed as its caller sees it
    floor       bytes that such a step reads, over the speed of a copy measured in this run

`adaptive:<b>` plans the widths of its blocks within the bytes that uniform widths of b bits take:
the rest of the arena is ballast. All it needs for the measured steps is set aside beforehand, so
that the bytes of its weights stay those. `held:<b>` has the widths that `adaptive:<b>` had, in an
engine whose widths are fixed: what adaptive precision adds to a step beside its widths is the
difference.
"""

from __future__ import annotations

import itertools
import logging
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pw.config import EngineConfig
from pw.engine import Engine
from pw.errors import BudgetError, ConfigError, PwError
from pw.evaluation.bench.faults import clear, ended, is_lost, left_out, message
from pw.evaluation.bench.filling import Ballast, fill
from pw.evaluation.bench.floor import copy_bandwidth, step_bytes
from pw.evaluation.bench.matrix_limits import Limits
from pw.evaluation.bench.matrix_policies import Widths, by_engine, out_of_bounds, parse_policy
from pw.evaluation.bench.profile import class_floors, kernel_milliseconds
from pw.evaluation.bench.tables import at_equal_bytes, head, line, speedups
from pw.evaluation.bench.timing import (
    captured,
    collect,
    device_milliseconds,
    first_tokens,
    in_turn,
    random_prompts,
    step_tokens,
    timed,
)

logger = logging.getLogger(__name__)

_SETTLE = 40  # steps before the measured ones: planes rest, and contexts grow alike in all cells
_REST = 12  # steps behind the measured ones
_PROMPT_RUNS = 3  # of real prompts, of which the median counts: they keep the host busy
_LATE = {"left_out": "no time left", "hint": "raise --seconds"}
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
    kernels: bool = False  # also where the device's time goes

    def __post_init__(self) -> None:
        for flag, numbers in (
            ("--batch-size", self.batches),
            ("--context", self.contexts),
            ("--steps", (self.steps,)),
            ("--prompt-tokens", (self.prompt_tokens,)),
            ("--most-tokens", (self.most_tokens,)),
        ):
            if min(numbers) < 1:
                raise ConfigError(f"{flag} must be at least 1: {min(numbers)}")
        for policy in self.policies:
            parse_policy(policy)
            planned = policy.replace("held", "adaptive")
            if planned not in self.policies:
                raise ConfigError(f"`{policy}` holds the widths of `{planned}`", "ask for both")

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

    def check(self, limits: Limits, config: EngineConfig) -> None:
        """Refuse what a model and the settings of engines do not allow.

        Cells of some contexts, and of some widths that there are no planes of, are left out
        instead.

        Raises:
            ConfigError: All contexts are too long, there are planes for no policy, or the settings
                do not allow the width of one.
        """
        for policy in self.policies:
            if (refusal := out_of_bounds(policy, config)) is not None:
                raise refusal
        missing = [error for policy in self.policies if (error := limits.of_policy(policy))]
        if missing and len(missing) == len(self.policies):
            raise missing[0]
        limits.check(self.contexts, self.steps, self.tokens)

    def possible(self, limits: Limits) -> tuple[int, ...]:
        """The contexts that a model allows."""
        return tuple(
            context
            for context in self.contexts
            if limits.of_context(context, self.steps, self.tokens) is None
        )


def run_matrix(
    folder: Path,
    config: EngineConfig,
    matrix: Matrix,
    advance: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure all cells; Ctrl-C and a lost device end the run, and the cells so far are kept.

    The result says so: `interrupted`, and `failed` with the error in a line.

    Args:
        folder: An artifact, or what stands for dummy weights.
        config: Of the engines, but for the policy; no prefix cache.
        matrix: What to measure. Cells that the model does not allow are left out.
        advance: Told each cell when it is done.

    Raises:
        ConfigError: None can be measured.
    """
    limits = Limits.of(folder, config.load_format)
    matrix.check(limits, config)
    tokens = matrix.tokens
    config = replace(
        config,
        enable_prefix_caching=False,
        max_num_seqs=max(matrix.batches),
        max_model_len=max(matrix.possible(limits)) + tokens,
        planner=replace(
            config.planner, low_watermark=0.0, high_watermark=_TINY, forecast_steps=tokens
        ),
    )
    run, result = _Run(folder, config, matrix, limits, advance), dict[str, Any](interrupted=False)
    try:
        run.measure()
    except KeyboardInterrupt:
        result["interrupted"] = True
    except Exception as error:
        if not run.measured:
            raise
        logger.error("the run is over, what was measured is kept", exc_info=error)
        result["failed"] = message(error)
    return {
        "copy_bandwidth_GB_s": run.speed / 1e9,
        "starts": run.starts,
        "cells": run.cells,
        "speedups_over_dense": speedups(run.cells),
        "adaptive_over_uniform": at_equal_bytes(run.cells),
    } | result


class _Run:
    """The cells of a run, each added as it is measured."""

    def __init__(
        self,
        folder: Path,
        config: EngineConfig,
        matrix: Matrix,
        limits: Limits,
        advance: Callable[[str], None],
    ) -> None:
        self._folder, self._config, self._matrix = folder, config, matrix
        self._limits, self._advance = limits, advance
        self._refusals: list[ConfigError] = []  # of policies
        self._ends = time.monotonic() + matrix.seconds
        self.cells: list[dict[str, Any]] = []
        self.starts: list[dict[str, Any]] = []  # of engines: seconds to the first prompts' end
        self.speed = 0.0  # of a copy in bytes a second, once it has been measured

    @property
    def measured(self) -> bool:
        """Whether a cell has been."""
        return any("left_out" not in cell for cell in self.cells)

    def measure(self) -> None:
        """Measure all cells.

        Raises:
            ConfigError: No policy can be measured.
            Exception: What no cell can be measured after.
        """
        with tempfile.TemporaryDirectory() as temporary:
            widths = Widths(Path(temporary))
            for group in by_engine(self._with_widths()):
                if self._late():
                    self.cells += [{"policy": policy} | _LATE for policy in group]
                    continue
                started = time.perf_counter()
                if (engine := self._open(group[0], widths)) is not None:
                    with ended(engine):
                        self._warm_up(engine, group[0], started)
                        self._measure_with(engine, group, widths)
                    del engine
                collect()
        if self._refusals and len(self._refusals) == len(self.cells):
            raise self._refusals[0]  # with its hint

    def _with_widths(self) -> list[str]:
        """Policies whose widths there are; a cell says of each other one why not."""
        found = []
        for policy in self._matrix.policies:
            if (refusal := self._limits.of_policy(policy)) is None:
                found.append(policy)
            else:
                self._leave_out(policy, refusal)
        return found

    def _leave_out(self, policy: str, error: Exception) -> None:
        if isinstance(error, ConfigError):
            self._refusals.append(error)
        why = left_out(error)
        if "hint" in why:  # here sequences are what a batch has
            why["hint"] = why["hint"].replace("--max-num-seqs", "--batch-size")
        self._add({"policy": policy} | why)

    def _late(self) -> bool:
        return time.monotonic() > self._ends

    def _add(self, cell: dict[str, Any]) -> None:
        if not self.cells:
            self._advance(head())
        self.cells.append(cell)
        self._advance(line(cell))

    def _open(self, policy: str, widths: Widths) -> Engine | None:
        """An engine; None, and a cell that says why not."""
        try:
            chosen = replace(self._config, policy=widths.policy(policy))
            return Engine.from_artifact(self._folder, chosen)
        except (BudgetError, ConfigError, torch.OutOfMemoryError) as error:
            self._leave_out(policy, error)
            return None

    def _warm_up(self, engine: Engine, policy: str, started: float) -> None:
        """Compute a prompt of each length."""
        for context in self._matrix.possible(self._limits):
            first_tokens(engine, 1, min(context, self._matrix.prompt_tokens), seed=-1)
        seconds = time.perf_counter() - started
        self.starts.append({"policy": policy, "seconds": seconds})
        self._advance(f"{policy}: ready in {seconds:.1f} s")

    def _measure_with(self, engine: Engine, group: Sequence[str], widths: Widths) -> None:
        """Add the cells of an engine."""
        matrix = self._matrix
        self.speed = self.speed or copy_bandwidth(engine._parts.arena.pages.device)
        ballast = Ballast(engine)
        for policy, (batch, context) in itertools.product(group, matrix.shapes):
            cell = _Cell(engine, ballast, policy, batch, context, matrix)
            if self._late():
                self._add(cell.name | _LATE)
                continue
            refusal = self._limits.of_context(context, matrix.steps, matrix.tokens)
            if refusal is not None:
                self._add(cell.name | left_out(refusal))
                continue
            try:
                found = cell.measure(self.speed)
            except Exception as error:
                self._add(cell.name | left_out(error))
                if is_lost(error):
                    raise
                if not isinstance(error, PwError):
                    logger.error("a cell is left out", exc_info=error)
                ballast.leave(engine._parts.pool.num_pages)  # of which the books know nothing
                clear(engine)
            else:
                widths.note(policy, engine)
                self._add(found)


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
        """The figures.

        Raises:
            PwError: The contexts do not fit, or a sequence did not last to the end.
        """
        name, engine, matrix, started = self.name, self._engine, self._matrix, time.perf_counter()
        self._set_bytes()
        first = None
        if self._batch * self._context <= matrix.prompt_tokens:
            first_tokens(engine, self._batch, self._context, 1000 + self._batch)  # compiles
            first = sorted(
                first_tokens(engine, self._batch, self._context, self._batch + 100 * run)
                for run in range(_PROMPT_RUNS)
            )[_PROMPT_RUNS // 2]
        prompts = random_prompts(engine, self._batch, self._context, seed=0)
        names = fill(engine, prompts, matrix.tokens)
        timed(engine, _SETTLE, self._batch)
        times = timed(engine, matrix.steps, self._batch)
        status = engine.status()
        turn = in_turn(engine, max(1, matrix.steps // 4), self._batch)
        device = kernels = None
        if (run := captured(engine, self._batch)) is not None:
            device = device_milliseconds(run)
            kernels = kernel_milliseconds(run) if matrix.kernels else None
        read = step_bytes(engine)
        for request in names:
            engine.abort(request)
        median = float(np.percentile(times, 50))
        floor = read.total / bandwidth * 1e3
        return name | {
            "tokens_per_second": self._batch * len(times) / (sum(times) / 1e3),
            "itl_p50_ms": median,
            "itl_p99_ms": float(np.percentile(times, 99)),
            "in_turn_p50_ms": None if turn is None else float(np.percentile(turn, 50)),
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
            "kernels_ms": kernels,
            "kernels_floor_ms": class_floors(read, bandwidth),
            "bytes": asdict(status.bytes),
            "max_num_batched_tokens": step_tokens(engine),
            "seconds": time.perf_counter() - started,
        }

    def _set_bytes(self) -> None:
        """Leave an adaptive engine the bytes of a uniform width beside the cell's KV."""
        policy, bits = parse_policy(self._policy)
        if bits is None or policy.kind != "adaptive":
            return
        parts = self._engine._parts
        assert parts.table is not None
        cost = parts.table.cost_bytes()[:, bits - parts.table.min_bits].sum()
        weights = int(cost) // parts.arena.page_bytes
        longest = self._context + self._matrix.tokens - 1
        self._ballast.leave(weights + self._batch * parts.kv.pages_for_tokens(longest) + 1)
