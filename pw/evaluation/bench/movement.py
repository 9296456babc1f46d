"""What moving planes costs: bytes a second by copy size, decode steps quiet and while reloading.

    python -m pw.evaluation.bench.movement artifacts/tiny.pw
    python -m pw.evaluation.bench.movement pipelines/recipes/configs/mixtral-8x7b.json

Rates are of the mover's own lane, between host memory as the store pins it and pages of an arena.
Steps are of an engine that decodes `--batch` requests: all blocks fall to the least width and come
back over and over, so that planes are under way in as many steps as are measured.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from pw.config import EngineConfig, PlannerConfig, PrecisionPolicy, parse_bytes
from pw.engine import Engine
from pw.engine.request import SamplingParams
from pw.errors import PwError
from pw.evaluation.bench.report import machine, render
from pw.evaluation.bench.timing import served
from pw.memory.arena import Arena
from pw.memory.lanes import DirectLane, Lane, StreamLane
from pw.memory.pinned import HostSlab
from pw.models.stand_in import write_folder
from pw.planning.pressure import Decision

COPY_BYTES = tuple(1 << power for power in (18, 19, 20, 21, 22, 24))
_PAGE = 1 << 15
_PROMPT = 16  # tokens
_MOST_TURNS = 50  # of requests that decode to the longest context
_SPELL = 25  # steps, moving or quiet, before it is the others' turn


def rate(device: torch.device, copy_bytes: int, total_bytes: int, depth: int = 2) -> float:
    """GB/s from the host into scattered pages, one run in each chunk.

    Args:
        device: Of the arena.
        copy_bytes: Of a chunk; whole pages of 32 KiB.
        total_bytes: Copied in all, from places that are never the same twice running.
        depth: Chunks under way.
    """
    count, chunks = copy_bytes // _PAGE, max(2, total_bytes // copy_bytes)
    spans = 8
    slab = HostSlab(spans * count, _PAGE, pin=device.type == "cuda")
    arena = Arena(2 * count, _PAGE, device)
    lane: Lane = StreamLane(arena, count, depth) if device.type == "cuda" else DirectLane(arena)
    pages = np.random.default_rng(0).permutation(2 * count)[:count].tolist()
    tickets: deque[Any] = deque()
    fence = lane.fence()
    for number in range(spans + chunks):
        if number == spans:  # the first round touches the memory
            while tickets:
                lane.wait(tickets.popleft())
            started = time.perf_counter()
        if len(tickets) == lane.depth:
            lane.wait(tickets.popleft())
        start = number % spans * count
        tickets.append(lane.submit([slab.pages[start : start + count]], pages, fence))
    while tickets:
        lane.wait(tickets.popleft())
    return chunks * copy_bytes / (time.perf_counter() - started) / 1e9


class Steps:
    """Milliseconds of decode steps, quiet and while planes are on their way.

    Both in turns of a few steps of the same requests, at the same widths: quiet ones with the
    policy held still between two spells of movement.

    Args:
        engine: Adaptive, with nothing to do, room for `batch` requests and all planes up.
        batch: Requests that decode.

    Attributes:
        times: Of steps, by whether planes moved.
        points: Of the safe points in them.
        in_turn: Of quiet steps that do not overlap.
    """

    def __init__(self, engine: Engine, batch: int) -> None:
        self._engine, self._batch = engine, batch
        self._random = np.random.default_rng(0)
        self.times: dict[bool, list[float]] = {False: [], True: []}
        self.points: dict[bool, list[float]] = {False: [], True: []}
        self.in_turn: list[float] = []

    def run(self, steps: int) -> dict[str, Any]:
        """The figures, of so many steps of each kind at least.

        Raises:
            PwError: No plane moved: the budget leaves no room, or there is one width alone.
        """
        engine = self._engine
        began, widest = engine.status(), engine.status().mean_bits
        turns = 0
        while turns < _MOST_TURNS and min(map(len, self.times.values())) < steps:
            self._turn(turns, steps, f"static:{max(2, round(widest / 2))}")
            turns += 1
        engine.check_integrity()
        if not self.times[True]:
            raise PwError("no plane moved in any decode step", "raise --memory-budget")
        now = engine.status()
        moved, moves = now.bytes_reloaded - began.bytes_reloaded, now.moves - began.moves
        quiet, moving = (np.array(self.times[kind]) for kind in (False, True))
        return {
            "batch": self._batch,
            "turns": turns,
            "reloaded_bytes": moved,
            "reloaded_GB_s_while_moving": moved / (moving.sum() / 1e3) / 1e9,
            "raise_to_commit_mean_ms": (now.move_seconds_total - began.move_seconds_total)
            / max(1, moves)
            * 1e3,
            "plan_mean_ms": (now.plan_seconds_total - began.plan_seconds_total)
            / max(1, now.plan_runs - began.plan_runs)
            * 1e3,
            "plan_runs": now.plan_runs - began.plan_runs,
            **_percentiles("quiet", self.times[False], self.points[False]),
            **_percentiles("moving", self.times[True], self.points[True]),
            "quiet_in_turn_p50_ms": float(np.percentile(self.in_turn, 50))
            if self.in_turn
            else None,
            "p50_ratio": float(np.percentile(moving, 50) / np.percentile(quiet, 50)),
            "p99_ratio": float(np.percentile(moving, 99) / np.percentile(quiet, 99)),
        }

    def _turn(self, turn: int, steps: int, narrow: str) -> None:
        """Requests that decode while planes come back from a narrow width."""
        engine = self._engine
        limit = engine.max_model_len - _PROMPT
        vocabulary = engine.tokenizer.vocab_size
        params = SamplingParams(temperature=0.0, max_tokens=limit, ignore_eos=True)
        names = [f"movement-{turn}-{row}" for row in range(self._batch)]
        for name in names:
            prompt = self._random.integers(vocabulary, size=_PROMPT).tolist()
            engine.add_request(name, prompt, params)
        engine.set_policy(narrow)
        engine.set_policy("adaptive")
        left = limit - 2 - self._until(lambda: self._moves, limit // 4)
        while left > 2 * _SPELL and min(map(len, self.times.values())) < steps:
            if self._all_back:
                break
            left -= self._until(lambda: self._moves, limit // 4)
            left -= self._spell(moving=True)
            with _held_still(engine):
                left -= self._until(lambda: not self._moves, limit // 4)
                left -= self._spell(moving=False)
        with _held_still(engine):
            left -= self._until(lambda: not self._moves, limit // 4)
            self._in_turn(min(_SPELL, left - 2))
        for name in names:
            engine.abort(name)
        counts = (len(self.times[kind]) for kind in (True, False))
        _tell("batch {}, turn {}: {} moving and {} quiet steps".format(self._batch, turn, *counts))

    def _in_turn(self, steps: int) -> None:
        """Quiet steps that are launched when the last has been read; whole ones are noted."""
        launcher = self._engine._launcher
        overlaps, launcher._overlaps = launcher._overlaps, False
        try:
            for number in range(steps):
                started = time.perf_counter()
                outputs = self._engine.step()
                elapsed = (time.perf_counter() - started) * 1e3
                if served(outputs) == self._batch and number:  # the first was on its way
                    self.in_turn.append(elapsed)
        finally:
            launcher._overlaps = overlaps

    @property
    def _all_back(self) -> bool:
        table, precision = self._engine._parts.table, self._engine._parts.precision
        return table is not None and int(table.committed.min()) >= precision.most_bits

    @property
    def _moves(self) -> bool:
        mover = self._engine._parts.mover
        return mover is not None and mover.pending > 0

    def _until(self, reached: Callable[[], bool], most: int) -> int:
        """Steps that are not timed; how many."""
        for number in range(most):
            if reached() or not self._engine.has_work():
                return number
            served(self._engine.step())  # raises where a request has failed
        return most

    def _spell(self, *, moving: bool) -> int:
        """A few steps, each noted where it belongs; how many."""
        engine, precision = self._engine, cast("Any", self._engine._parts.precision)
        plain, points = precision.safe_point, list[float]()

        def timed(*arguments: Any) -> None:
            started = time.perf_counter()
            plain(*arguments)
            points.append((time.perf_counter() - started) * 1e3)

        precision.safe_point = timed
        try:
            for _ in range(_SPELL):
                if not engine.has_work():
                    break  # at the longest context
                before = self._moves
                started = time.perf_counter()
                outputs = engine.step()
                elapsed = (time.perf_counter() - started) * 1e3
                whole = served(outputs) == self._batch
                if whole and (before or self._moves) == moving:
                    self.times[moving].append(elapsed)
                    self.points[moving] += points
                points.clear()
        finally:
            del precision.safe_point
        return _SPELL


def _tell(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


@contextmanager
def _held_still(engine: Engine) -> Iterator[None]:
    """No raise begins inside; those planned go on afterwards."""
    precision: Any = engine._parts.precision
    precision._pressure.decide = lambda **_: Decision(reason="held still")
    precision._begin_planned = lambda _: []
    try:
        yield
    finally:
        del precision._pressure.decide, precision._begin_planned


def _percentiles(name: str, milliseconds: list[float], points: list[float]) -> dict[str, Any]:
    found: dict[str, Any] = {f"{name}_steps": len(milliseconds)}
    for percentile in (50, 99):
        found[f"{name}_p{percentile}_ms"] = float(np.percentile(milliseconds, percentile))
        found[f"{name}_safe_point_p{percentile}_ms"] = float(np.percentile(points, percentile))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print one table.

    Returns:
        0, or 1 after a known error.
    """
    parser = argparse.ArgumentParser(prog="movement", description=__doc__)
    parser.add_argument("model", type=Path, help="an artifact, or a config for dummy weights")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--memory-budget", type=parse_bytes, default=None)
    parser.add_argument("--transfer-budget", type=parse_bytes, default=1 << 28, help="a second")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--no-async-scheduling", action="store_true")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--copied", type=parse_bytes, default=1 << 31, help="for each rate")
    parser.add_argument("--form", default="md", choices=("md", "csv", "json"))
    options = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory() as folder:
            engine = _engine(options, Path(folder))
        _tell("the engine is ready")
        device = engine._parts.arena.pages.device
        steps = {}
        for batch in options.batch:
            steps[f"batch_{batch}"] = found = Steps(engine, batch).run(options.steps)
            _tell(str(found))
        rates = {
            f"copies_of_{size >> 10}_KiB_GB_s": rate(device, size, options.copied)
            for size in COPY_BYTES
        }
        engine.close()
    except PwError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(render([machine() | rates | steps], options.form))
    return 0


def _engine(options: argparse.Namespace, folder: Path) -> Engine:
    """An adaptive engine on an artifact, or on dummy weights made up in `folder`."""
    path, dummy = options.model, options.model.suffix == ".json"
    if dummy:
        write_folder(path, folder, {})
    config = EngineConfig(
        memory_budget=options.memory_budget,
        policy=PrecisionPolicy("adaptive"),
        device=options.device,
        load_format="dummy" if dummy else "auto",
        max_num_seqs=max(options.batch),
        max_model_len=options.max_model_len,
        enable_prefix_caching=False,
        async_scheduling=not options.no_async_scheduling,
        planner=PlannerConfig(transfer_budget_bytes=options.transfer_budget),
    )
    return Engine.from_artifact(folder if dummy else path, config)


if __name__ == "__main__":
    sys.exit(main())
