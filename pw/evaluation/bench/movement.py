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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pw.config import EngineConfig, PlannerConfig, PrecisionPolicy, parse_bytes
from pw.engine import Engine
from pw.engine.request import SamplingParams
from pw.errors import PwError
from pw.evaluation.bench.report import machine, render
from pw.memory.arena import Arena
from pw.memory.lanes import DirectLane, Lane, StreamLane
from pw.memory.pinned import HostSlab
from pw.models.stand_in import write_folder

COPY_BYTES = tuple(1 << power for power in (18, 19, 20, 21, 22, 24))
_PAGE = 1 << 15
_PROMPT = 16  # tokens
_MOST_TURNS = 50  # of requests that decode to the longest context


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


def decode_steps(engine: Engine, batch: int, steps: int) -> dict[str, Any]:
    """Milliseconds of decode steps by whether planes were on their way in them.

    Args:
        engine: Adaptive, with nothing to do, room for `batch` requests and all planes up.
        batch: Requests that decode.
        steps: Of each kind, at least.

    Raises:
        PwError: No plane moved: the budget leaves no room, or there is one width alone.
    """
    random = np.random.default_rng(0)
    vocabulary = engine.tokenizer.vocab_size
    limit = engine.max_model_len - _PROMPT
    widest = engine.status().mean_bits
    quiet: list[float] = []
    moving: list[float] = []
    began = engine.status().bytes_reloaded
    for turn in range(_MOST_TURNS):
        if min(len(quiet), len(moving)) >= steps:
            break
        for row in range(batch):
            prompt = random.integers(vocabulary, size=_PROMPT).tolist()
            params = SamplingParams(temperature=0.0, max_tokens=limit, ignore_eos=True)
            engine.add_request(f"movement-{turn}-{row}", prompt, params)
        engine.step()  # prompts
        engine.set_policy(f"static:{max(2, round(widest / 2))}")
        engine.set_policy("adaptive")
        _decode(engine, min(limit - 2, 4 * steps), quiet, moving)
        for row in range(batch):
            engine.abort(f"movement-{turn}-{row}")
    engine.check_integrity()
    if not moving:
        raise PwError("no plane moved in any decode step", "raise --memory-budget")
    moved = engine.status().bytes_reloaded - began
    return {
        "batch": batch,
        "reloaded_bytes": moved,
        "reloaded_GB_s_while_moving": moved / (sum(moving) / 1e3) / 1e9,
        **_percentiles("quiet", quiet),
        **_percentiles("moving", moving),
        "p99_ratio": float(np.percentile(moving, 99) / np.percentile(quiet, 99)) if quiet else None,
    }


def _decode(engine: Engine, steps: int, quiet: list[float], moving: list[float]) -> None:
    """Decode, and note each step's milliseconds where they belong."""
    before = engine.status()
    for _ in range(steps):
        started = time.perf_counter()
        engine.step()
        elapsed = (time.perf_counter() - started) * 1e3
        after = engine.status()
        moved = before.moves_in_flight > 0 or after.moves_in_flight > 0
        if moved or after.transitions == before.transitions:
            (moving if moved else quiet).append(elapsed)
        before = after


def _percentiles(name: str, milliseconds: list[float]) -> dict[str, Any]:
    found: dict[str, Any] = {f"{name}_steps": len(milliseconds)}
    for percentile in (50, 99) if milliseconds else ():
        found[f"{name}_p{percentile}_ms"] = float(np.percentile(milliseconds, percentile))
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
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--copied", type=parse_bytes, default=1 << 31, help="for each rate")
    parser.add_argument("--form", default="md", choices=("md", "csv", "json"))
    options = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory() as folder:
            engine = _engine(options, Path(folder))
        device = engine._parts.arena.pages.device
        rates = {
            f"copies_of_{size >> 10}_KiB_GB_s": rate(device, size, options.copied)
            for size in COPY_BYTES
        }
        steps = {f"batch_{n}": decode_steps(engine, n, options.steps) for n in options.batch}
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
        planner=PlannerConfig(transfer_budget_bytes=options.transfer_budget),
    )
    return Engine.from_artifact(folder if dummy else path, config)


if __name__ == "__main__":
    sys.exit(main())
