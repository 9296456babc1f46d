"""One model on one GPU and on several: decode speed, bytes of each rank, planes that move.

    python kernels/bench/ranks.py --json out.json           # Mixtral-8x7B's shape, twice its layers
    python kernels/bench/ranks.py --cases 32:4:1 32:4:2 32:4:2e --batches 1 8 32
    python kernels/bench/ranks.py --cases 32:4:2 --squeeze 3  # planes that move on all ranks

A case is LAYERS:BITS:RANKS, `e` behind it for --enable-expert-parallel; each runs in a process of
its own, in the order given. Weights are random, in the shape of a config. Requests start with a
context that counts as computed: their KV pages are taken and hold whatever the arena held. Decode
steps are timed as their caller sees them (median), from CUDA graphs, launched ahead. What a step's
time goes to is rank 0's, by kernel, from torch's profiler over some steps more.
"""

import argparse
import dataclasses
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pw.config import EngineConfig, PlannerConfig, PrecisionPolicy
from pw.engine import Engine
from pw.engine.request import EngineStatus, SamplingParams
from pw.evaluation.bench.squeeze import Squeeze, SqueezeRun, tight_budget
from pw.memory.prefix_cache import PrefixMatch
from pw.models.stand_in import write_folder

CONFIGS = Path(__file__).parents[2] / "pipelines" / "recipes" / "configs"
CASES = ["32:4:1", "32:4:2", "32:4:2e", "64:4:1", "64:4:2", "64:8:2"]
WARM, PROFILED, SPARE = 8, 8, 16  # steps
SHOWN = 12  # kernels
LOW_WATERMARK = PlannerConfig().low_watermark


def settings(case: str, options: argparse.Namespace) -> dict[str, Any]:
    """Settings of a case's engine."""
    _, bits, ranks = case.split(":")
    return {
        "policy": PrecisionPolicy.parse(f"static:{bits}"),
        "device": "cuda",
        "load_format": "dummy",
        "tensor_parallel_size": int(ranks.rstrip("e")),
        "enable_expert_parallel": ranks.endswith("e"),
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
    kernels = profile(engine)
    for number in range(batch):
        engine.abort(f"{number}")
    median = statistics.median(times)
    return {
        "batch": batch,
        "step_ms": median,
        "step_p99_ms": float(np.percentile(times, 99)),
        "tokens_per_second": batch / median * 1e3,
        "kernels_ms": kernels,
        "bytes_by_rank": by_rank(status),
    }


def by_rank(status: EngineStatus) -> list[dict[str, int]]:
    """Bytes by class of every rank."""
    return [dataclasses.asdict(each) for each in status.ranks or (status.bytes,)]


def profile(engine: Engine) -> dict[str, float]:
    """Milliseconds of a step on rank 0 by kernel; a sum includes the wait for the other ranks."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(PROFILED):
            engine.step()
        torch.cuda.synchronize()
    found = {
        event.key: event.self_device_time_total / 1e3 / PROFILED
        for event in seen.key_averages()
        if event.self_device_time_total
    }
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def prefill(engine: Engine, options: argparse.Namespace) -> dict[str, float]:
    """Seconds of a prompt of the context's length, the second of two."""
    params = SamplingParams(temperature=0, max_tokens=1)
    for seed in range(2):
        prompt = np.random.default_rng(seed).integers(100, 5000, size=options.context).tolist()
        began = time.perf_counter()
        engine.generate([prompt], params)
        seconds = time.perf_counter() - began
    return {"seconds": seconds, "tokens_per_second": options.context / seconds}


def squeeze(folder: Path, case: str, options: argparse.Namespace) -> dict[str, Any]:
    """Cycles of pressure and rest over an adaptive engine: planes move on every rank."""
    shape = settings(case, options) | {
        "policy": PrecisionPolicy.parse("adaptive"),
        "max_bits": int(case.split(":")[1]),
        "max_num_batched_tokens": 2048,
        "planner": PlannerConfig(residual="off", idle_grace_seconds=0.0),
    }
    roomy = Engine.from_artifact(folder, EngineConfig(**(shape | {"enforce_eager": True})))
    budget = tight_budget(roomy, LOW_WATERMARK) + (1 << 30)  # what graphs set aside
    roomy.close()
    del roomy
    torch.cuda.empty_cache()
    engine = Engine.from_artifact(folder, EngineConfig(**shape, memory_budget=budget))
    try:
        run = SqueezeRun(engine, Squeeze(cycles=options.squeeze, probes=2, return_seconds=20.0))
        result = run.run()
        result["bytes_by_rank"] = by_rank(engine.status())
        del result["bytes"]
        return result
    finally:
        engine.close()


def run_case(case: str, options: argparse.Namespace) -> dict[str, Any]:
    """All figures of a case, in a process that has no other."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    result: dict[str, Any] = {"case": case}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        layers = int(case.split(":")[0])
        write_folder(CONFIGS / f"{options.model}.json", folder, {"num_hidden_layers": layers})
        if options.squeeze:
            return result | {"squeeze": squeeze(folder, case, options)}
        began = time.perf_counter()
        engine = Engine.from_artifact(folder, EngineConfig(**settings(case, options)))
        result["start_seconds"] = time.perf_counter() - began
        try:
            if engine._parts.runner.steps is None:
                raise SystemExit("nothing was captured, see the warning above")
            scheduler = engine._parts.scheduler
            look_up = scheduler._find_prefix
            scheduler._find_prefix = (  # type: ignore[method-assign]
                lambda sequence: PrefixMatch(tokens=sequence.length - 1)
            )
            result["decode"] = []
            for batch in options.batches:
                if engine.pages_for_tokens(engine.max_model_len) * batch > (
                    engine.status().pages_free
                ):
                    print(f"{case}: {batch} sequences do not fit", file=sys.stderr)
                    continue
                result["decode"].append(decode(engine, batch, options))
            scheduler._find_prefix = look_up  # type: ignore[method-assign]
            if options.prefill:
                result["prefill"] = prefill(engine, options)
        finally:
            engine.close()
    return result


def start_case(case: str, arguments: list[str], seconds: float) -> dict[str, Any] | None:
    """Run a case in a process of its own; None if it fails or takes too long."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, __file__, *arguments, "--case", case, "--json", file.name]
        try:
            subprocess.run(command, check=True, timeout=seconds, stdout=2)
        except subprocess.SubprocessError as error:
            print(f"{case}: {error}", file=sys.stderr)
            return None
        result: dict[str, Any] = json.loads(Path(file.name).read_text())
    return result


def show(result: dict[str, Any]) -> None:
    """A case for reading."""
    for row in result.get("decode", []):
        kernels = row["kernels_ms"]
        total = sum(kernels.values())
        print(
            f"| {result['case']} | {row['batch']} | {row['step_ms']:.2f} "
            f"| {row['tokens_per_second']:.0f} | {total:.2f} "
            f"| {sum(ms for name, ms in kernels.items() if is_sum(name)):.2f} |",
            flush=True,
        )
    if "prefill" in result:
        print(f"{result['case']} prompt: {result['prefill']['tokens_per_second']:.0f} tokens/s")
    if "squeeze" in result:
        print(f"{result['case']} squeeze: {json.dumps(result['squeeze'])}")


def is_sum(name: str) -> bool:
    """Whether a kernel adds up over the ranks."""
    return "nccl" in name.lower() or "all_reduce" in name


def main() -> None:
    """Run the cases, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="mixtral-8x7b", help="of pipelines/recipes/configs")
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=8192, help="tokens")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--squeeze", type=int, default=0, help="cycles, in the place of the steps")
    parser.add_argument("--prefill", action="store_true", help="time a prompt, too")
    parser.add_argument("--seconds", type=float, default=120.0, help="that a case may take")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        options.json.write_text(json.dumps(run_case(options.case, options)))
        return
    print("| layers:bits:ranks | batch | ms a step | tokens/s | kernels, ms | of it sums, ms |")
    print("|---" * 6 + "|", flush=True)
    results = []
    for case in options.cases:
        result = start_case(case, sys.argv[1:], options.seconds)
        if result is not None:
            show(result)
            results.append(result)
    for result in results:
        for row in result.get("decode", [])[:1]:
            print(f"{result['case']}, batch {row['batch']}, ms a step by kernel:")
            for name, milliseconds in list(row["kernels_ms"].items())[:SHOWN]:
                print(f"  {milliseconds:7.3f}  {name[:90]}")
    if options.json:
        about = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "options": {key: str(value) for key, value in vars(options).items()},
        }
        options.json.write_text(json.dumps(about | {"results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
