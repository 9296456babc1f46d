"""A case of ranks.py: one engine over one or several ranks, started, then measured when told to.

Weights are random, in the shape of a config. Requests start with a context that counts as computed:
their KV pages are taken and hold whatever the arena held. Decode steps are timed as their caller
sees them (median), from CUDA graphs, launched ahead. What a step's time goes to is rank 0's, by
kernel, from torch's profiler over some steps more. How many experts a layer reads, and the busiest
rank of them, is looked at in one step.
"""

import argparse
import dataclasses
import gc
import json
import logging
import re
import statistics
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pw.config import EngineConfig, PlannerConfig, PrecisionPolicy
from pw.engine import Engine
from pw.engine.experts import RoutedExperts
from pw.engine.request import EngineStatus, SamplingParams
from pw.evaluation.bench.squeeze import SqueezeRun, tight_budget
from pw.evaluation.bench.squeeze_settings import Squeeze
from pw.memory.prefix_cache import PrefixMatch
from pw.models.stand_in import write_folder
from pw.store.manifest import plain

CONFIGS = Path(__file__).parents[2] / "pipelines" / "recipes" / "configs"
WARM, PROFILED, SPARE = 8, 8, 16  # steps
IDLE = "between kernels"
READY, MEASURED = "ready", "measured"  # what a case says
LOW_WATERMARK = PlannerConfig().low_watermark
ROOMY = 1 << 30  # bytes beyond a tight budget: what graphs set aside


@dataclasses.dataclass(frozen=True)
class Case:
    """What one engine is."""

    name: str
    layers: int
    bits: int
    ranks: int
    kind: str  # some of "e", "m", "n"
    device: str
    budget: int | None  # bytes

    @classmethod
    def parse(cls, text: str) -> "Case":
        """From the command line."""
        found = re.fullmatch(r"(\d+):(\d+):(\d+)([emn]*)(?:@(\d+))?(?:=(\d+))?", text)
        if found is None:
            raise SystemExit(f"not a case: `{text}`")
        layers, bits, ranks, kind, device, budget = found.groups()
        where = "cuda" if device is None else f"cuda:{device}"
        size = None if budget is None else int(budget) << 30
        name = f"{layers}:{bits}:{ranks}{kind}"
        return cls(name, int(layers), int(bits), int(ranks), kind, where, size)

    def settings(self, options: argparse.Namespace) -> dict[str, Any]:
        """Of the engine."""
        return {
            "policy": PrecisionPolicy.parse(f"static:{self.bits}"),
            "device": self.device,
            "load_format": "dummy",
            "tensor_parallel_size": self.ranks,
            "enable_expert_parallel": "e" in self.kind,
            "memory_budget": self.budget,
            "max_num_seqs": max(options.batches),
            "max_model_len": options.context + WARM + options.steps + PROFILED + SPARE,
            "async_scheduling": True,
            "enable_prefix_caching": False,
        }


def decode(engine: Engine, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """Speed of a batch whose contexts count as computed, and where a step's time goes."""
    rng = np.random.default_rng(batch)
    most = engine.max_model_len - options.context
    params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
    for number in range(batch):
        prompt = rng.integers(100, 5000, size=options.context).tolist()
        engine.add_request(f"{number}", prompt, params)
    times = []
    for number in range(WARM + options.steps):
        began = time.perf_counter()
        for output in engine.step():
            if output.error is not None:
                raise SystemExit(f"a request failed: {output.error}")
        if number >= WARM:
            times.append((time.perf_counter() - began) * 1e3)
    if len(engine._parts.scheduler.running) < batch:
        raise SystemExit(f"{batch} sequences of {options.context} tokens do not fit at once")
    status = engine.status()
    kernels, routed = profile(engine), routing(engine)
    for number in range(batch):
        engine.abort(f"{number}")
    median = statistics.median(times)
    return {
        "batch": batch,
        "step_ms": median,
        "step_p99_ms": float(np.percentile(times, 99)),
        "tokens_per_second": batch / median * 1e3,
        "kernels_ms": kernels,
        "routing": routed,
        "bytes_by_rank": by_rank(status),
    }


def by_rank(status: EngineStatus) -> list[dict[str, int]]:
    """Bytes by class of every rank."""
    return [dataclasses.asdict(each) for each in status.ranks or (status.bytes,)]


def profile(engine: Engine) -> dict[str, float]:
    """Milliseconds of a step on rank 0 by kernel, and what is left over; they add up to the step.

    A kernel that begins while others run has the time from their ends to its own. A sum has the
    wait for the other ranks, too.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(PROFILED):
            engine.step()
        torch.cuda.synchronize()
    runs = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in seen.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    )
    found: dict[str, float] = {}
    end = first = runs[0][0]
    for started, ended, name in runs:
        found[name] = found.get(name, 0.0) + max(0.0, ended - max(started, end))
        end = max(end, ended)
    found[IDLE] = end - first - sum(found.values())
    per_step = 1e3 * PROFILED
    return {name: us / per_step for name, us in sorted(found.items(), key=lambda item: -item[1])}


class Watch:
    """Experts that note who of so many is asked. For a step by calls: graphs come not by here."""

    def __init__(self, experts: RoutedExperts, count: int) -> None:
        self._experts, self._count, self.batch = experts, count, experts.batch
        self.asked: dict[int, list[int]] = {}  # [E] tokens of each expert, by layer

    def __call__(
        self, slot: int, module: nn.Module, x: Tensor, ids: Tensor, weights: Tensor
    ) -> Tensor:
        """See `RoutedExperts`."""
        counts = np.bincount(ids.flatten().cpu().numpy(), minlength=self._count)
        self.asked[slot] = counts.tolist()
        self._experts.batch = self.batch
        return self._experts(slot, module, x, ids, weights)


def routing(engine: Engine) -> dict[str, float]:
    """Experts that a layer reads in the next step: all of it, and the rank that reads most.

    Rank 0 makes that step by calls, the others as always: their sums are the same.
    """
    parts = engine._parts
    runner, steps, experts = parts.runner, parts.runner.steps, parts.runner._experts
    whole = parts.skeleton.geometry if parts.share is None else parts.share.whole
    watch = Watch(experts, whole.experts)
    runner.steps, runner._experts = None, watch
    parts.skeleton.bind_experts(watch)
    try:
        for _ in range(3):  # the next one is on its way
            engine.step()
    finally:
        runner.steps, runner._experts, experts.batch = steps, experts, None
        parts.skeleton.bind_experts(experts)
    placed = None if parts.share is None else parts.share.placed
    asked = np.array([watch.asked[slot] for slot in sorted(watch.asked)])  # [L, E]
    most = (asked > 0).sum(1)
    tokens = asked.sum(1)
    if placed is not None:
        by_rank = np.take_along_axis(asked[:, None], placed.reshape(len(placed), 1, -1), 2)
        by_rank = by_rank.reshape(placed.shape)  # [L, e, R]
        most, tokens = (by_rank > 0).sum(1).max(1), by_rank.sum(1).max(1)
    return {
        "experts": float((asked > 0).sum(1).mean()),
        "busiest_rank_experts": float(most.mean()),
        "busiest_rank_slots": float(tokens.mean()),
        "busiest_expert_slots": float(asked.max(1).mean()),
    }


def prefill(engine: Engine, options: argparse.Namespace) -> dict[str, float]:
    """Seconds of a prompt of the context's length, the second of two."""
    params = SamplingParams(temperature=0, max_tokens=1)
    for seed in range(2):
        prompt = np.random.default_rng(seed).integers(100, 5000, size=options.context).tolist()
        began = time.perf_counter()
        engine.generate([prompt], params)
        seconds = time.perf_counter() - began
    return {"seconds": seconds, "tokens_per_second": options.context / seconds}


def squeezed(folder: Path, case: Case, options: argparse.Namespace) -> Engine:
    """An adaptive engine whose widest experts leave little room."""
    shape = case.settings(options) | {
        "policy": PrecisionPolicy.parse("adaptive"),
        "max_bits": case.bits,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 2048,
        "planner": PlannerConfig(residual="off", idle_grace_seconds=0.0),
    }
    roomy = Engine.from_artifact(folder, EngineConfig(**(shape | {"enforce_eager": True})))
    budget = tight_budget(roomy, LOW_WATERMARK) + ROOMY
    roomy.close()
    del roomy
    gc.collect()
    torch.cuda.empty_cache()
    return Engine.from_artifact(folder, EngineConfig(**(shape | {"memory_budget": budget})))


def squeeze(engine: Engine, options: argparse.Namespace) -> dict[str, Any]:
    """Cycles of pressure and rest: planes move on every rank, whose tables are compared."""
    run = SqueezeRun(engine, Squeeze(cycles=options.cycles, probes=2, return_seconds=20.0))
    result = run.run()
    result["bytes_by_rank"] = by_rank(engine.status())
    del result["bytes"]
    return result


def steps(engine: Engine, case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Decode steps of each batch that fits."""
    rows = []
    scheduler = engine._parts.scheduler
    look_up = scheduler._find_prefix
    scheduler._find_prefix = (  # type: ignore[method-assign]
        lambda sequence: PrefixMatch(tokens=sequence.length - 1)
    )
    for batch in options.batches:
        pages = engine.pages_for_tokens(engine.max_model_len) * batch
        if pages > engine.status().pages_free:
            print(f"{case.name}: {batch} sequences do not fit", file=sys.stderr)
            continue
        rows.append(decode(engine, batch, options))
    scheduler._find_prefix = look_up  # type: ignore[method-assign]
    result: dict[str, Any] = {"decode": rows}
    if options.prefill:
        result["prefill"] = prefill(engine, options)
    return result


def run_case(text: str, options: argparse.Namespace) -> None:
    """Be the process of a case: start, say so, measure when told to."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    case = Case.parse(text)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        layers = {"num_hidden_layers": case.layers}
        write_folder(CONFIGS / f"{options.model}.json", folder, layers)
        began = time.perf_counter()
        if "m" in case.kind:
            engine = squeezed(folder, case, options)
        else:
            engine = Engine.from_artifact(folder, EngineConfig(**case.settings(options)))
        started = time.perf_counter() - began
        try:
            if engine._parts.runner.steps is None:
                raise SystemExit("nothing was captured, see the warning above")
            print(READY, flush=True)
            sys.stdin.readline()
            result: dict[str, Any] = {
                "case": case.name,
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "start_seconds": started,
            }
            if "m" in case.kind:
                result["squeeze"] = squeeze(engine, options)
            else:
                result |= steps(engine, case, options)
            options.json.write_text(json.dumps(plain(result)))
            print(MEASURED, flush=True)
        finally:
            began = time.perf_counter()
            engine.close()
            logging.info("%s: closed in %.1f s", case.name, time.perf_counter() - began)
