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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pw.config import EngineConfig, PrecisionPolicy
from pw.engine import Engine
from pw.errors import BudgetError, ConfigError, PwError
from pw.evaluation.bench.faults import clear, ended, is_lost, message
from pw.evaluation.bench.filling import Ballast, fill
from pw.evaluation.bench.floor import copy_bandwidth, step_bytes
from pw.evaluation.bench.profile import class_floors, kernel_milliseconds
from pw.evaluation.bench.tables import at_equal_bytes, line, speedups
from pw.evaluation.bench.timing import (
    captured,
    collect,
    device_milliseconds,
    first_tokens,
    in_turn,
    random_prompts,
    timed,
)
from pw.planning.bits_file import write_bits

logger = logging.getLogger(__name__)

_SETTLE = 40  # steps before the measured ones: planes rest, and contexts grow alike in all cells
_REST = 12  # steps behind the measured ones
_PROMPT_RUNS = 3  # of real prompts, of which the median counts: they keep the host busy
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
    kernels: bool = False  # also where the device's time goes

    def __post_init__(self) -> None:
        if not self.policies or min((*self.batches, *self.contexts, self.steps, 1)) < 1:
            raise ConfigError("policies, batches, contexts and steps must be at least 1")
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


def parse_policy(text: str) -> tuple[PrecisionPolicy, int | None]:
    """A policy, and for `adaptive:<b>` and `held:<b>` the uniform width whose bytes it has.

    Raises:
        ConfigError: It is none of `dense`, `static:<b>`, `adaptive:<b>`, `held:<b>`.
    """
    kind, _, bits = text.partition(":")
    if kind in ("adaptive", "held") and bits.isdigit():
        PrecisionPolicy.parse(f"static:{bits}")
        return PrecisionPolicy("adaptive" if kind == "adaptive" else "static"), int(bits)
    if text != "dense" and not (kind == "static" and bits.isdigit()):
        raise ConfigError(
            f"not a policy of the comparison: `{text}`",
            "use dense, static:3, adaptive:3, held:3",
        )
    return PrecisionPolicy.parse(text), None


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
    run, result = _Run(folder, config, matrix, advance), dict[str, Any](interrupted=False)
    try:
        run.measure()
    except KeyboardInterrupt:
        result["interrupted"] = True
    except Exception as error:
        if all("left_out" in cell for cell in run.cells):
            raise
        logger.error("the run is over, what was measured is kept", exc_info=error)
        result["failed"] = message(error)
    return {
        "copy_bandwidth_GB_s": run.speed / 1e9,
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
        advance: Callable[[str], None],
    ) -> None:
        self._folder, self._config, self._matrix = folder, config, matrix
        self._advance = advance
        self._ends = time.monotonic() + matrix.seconds
        self.cells: list[dict[str, Any]] = []
        self.speed = 0.0  # of a copy in bytes a second, once it has been measured

    def measure(self) -> None:
        """Measure all cells.

        Raises:
            Exception: What no cell can be measured after.
        """
        with tempfile.TemporaryDirectory() as temporary:
            widths = _Widths(Path(temporary))
            for group in _by_engine(self._matrix.policies):
                if self._late():
                    self.cells += [{"policy": policy, "left_out": _LATE} for policy in group]
                    continue
                started = time.perf_counter()
                if (engine := self._open(group[0], widths)) is not None:
                    with ended(engine):
                        self._warm_up(engine, group[0], started)
                        self._measure_with(engine, group, widths)
                    del engine
                collect()

    def _late(self) -> bool:
        return time.monotonic() > self._ends

    def _add(self, cell: dict[str, Any]) -> None:
        self.cells.append(cell)
        self._advance(line(cell))

    def _open(self, policy: str, widths: _Widths) -> Engine | None:
        """An engine; None, and a cell that says why not."""
        try:
            chosen = replace(self._config, policy=widths.policy(policy))
            return Engine.from_artifact(self._folder, chosen)
        except (BudgetError, torch.OutOfMemoryError) as error:
            self._add({"policy": policy, "left_out": message(error)})
            return None

    def _warm_up(self, engine: Engine, policy: str, started: float) -> None:
        """Compute a prompt of each length."""
        for context in self._matrix.contexts:
            first_tokens(engine, 1, min(context, self._matrix.prompt_tokens), seed=-1)
        self._advance(f"{policy}: ready in {time.perf_counter() - started:.1f} s")

    def _measure_with(self, engine: Engine, group: Sequence[str], widths: _Widths) -> None:
        """Add the cells of an engine."""
        matrix = self._matrix
        self.speed = self.speed or copy_bandwidth(engine._parts.arena.pages.device)
        ballast = Ballast(engine)
        for policy, (batch, context) in itertools.product(group, matrix.shapes):
            cell = _Cell(engine, ballast, policy, batch, context, matrix)
            if self._late():
                self._add(cell.name | {"left_out": _LATE})
                continue
            try:
                found = cell.measure(self.speed)
            except Exception as error:
                self._add(cell.name | {"left_out": message(error)})
                if is_lost(error):
                    raise
                if not isinstance(error, PwError):
                    logger.error("a cell is left out", exc_info=error)
                ballast.leave(engine._parts.pool.num_pages)  # of which the books know nothing
                clear(engine)
            else:
                widths.note(policy, engine)
                self._add(found)


def _by_engine(policies: Iterable[str]) -> list[list[str]]:
    """Policies that share an engine: adaptive ones, most bytes first (planes are only given up).

    Widths are held behind the adaptive ones that find them.
    """
    groups: dict[str, list[str]] = {}
    for policy in sorted(policies, key=lambda policy: policy.startswith("held")):
        kind = policy.partition(":")[0]
        groups.setdefault(kind if kind == "adaptive" else policy, []).append(policy)
    return [sorted(group, reverse=True) for group in groups.values()]


class _Widths:
    """Widths that adaptive policies have come to, in files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _file(self, bits: int) -> Path:
        return self._folder / f"{bits}.json"

    def note(self, policy: str, engine: Engine) -> None:
        """Keep those of a measured cell's end, if it is the first of its policy."""
        kind, bits = parse_policy(policy)
        table = engine._parts.table
        if kind.kind == "adaptive" and bits and table and not self._file(bits).exists():
            write_bits(self._file(bits), table.geometry, table.committed)

    def policy(self, text: str) -> PrecisionPolicy:
        """The policy of an engine.

        Raises:
            BudgetError: No cell has come to the widths that it holds.
        """
        policy, bits = parse_policy(text)
        if not text.startswith("held") or bits is None:
            return policy
        if not self._file(bits).exists():
            raise BudgetError(f"no cell of adaptive:{bits} was measured")
        return replace(policy, path=self._file(bits))


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
        name, engine, matrix = self.name, self._engine, self._matrix
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
