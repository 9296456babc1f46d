"""Routed experts for prompts on a GPU: plans side by side, beside unquantized weights.

    python kernels/bench/prompts.py                            # Qwen1.5-MoE-A2.7B
    python kernels/bench/prompts.py --model gemma4-26b --tokens 512 --bits 3 --json results.json

Each result is compared with the torch reference on the same random planes and tables, and with its
own repetition, then timed: the median duration of each kernel, as the profiler reports it, over
calls that rotate through batches. "products" is gate_up and down (and what puts their inputs in
order), launches kept apart, as the bf16 grouped matmul beside it; "layer" is all of it, replayed
from a CUDA graph with launches that overlap. A plan is written as `slots of a group:warpgroups of a
block.blocks on a multiprocessor`; the latter once more after a comma, if modules without wide
blocks are to be launched otherwise. `chosen` is the one that the product takes. One table comes
last.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grouped
import moe
import torch
import triton
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from pw_kernels import cuda_prompts, reference

Batch = tuple[Tensor, Tensor, Tensor]
AROUND = ("route", "arrange", "combine")  # kernels that are no products


def parse(text: str, slots: int, experts: int) -> cuda_prompts.Plan:
    """A plan from `slots:warpgroups.blocks`, or with `,warpgroups.blocks` for narrow widths."""
    if text == "chosen":
        return cuda_prompts.choose_plan(slots, experts)
    size, _, tunings = text.partition(":")
    parts = (cuda_prompts.Tuning(*map(int, part.split("."))) for part in tunings.split(","))
    return cuda_prompts.Plan(int(size), *parts)


def run(layer: moe.Layer, batch: Batch, plan: str, overlap: bool = True) -> Tensor:
    """The layer in the form for prompts, or in that of decode steps."""
    x, ids, weights = batch
    if plan == "decode":
        return layer.run(batch, moe.kept_apart(layer.model, len(x)))
    return cuda_prompts.fused_moe(
        x, ids, weights, layer.arena, layer.blocks["gate_up"].pages, layer.blocks["down"].pages,
        replace(parse(plan, ids.numel(), layer.model.experts), overlap=overlap), activation="silu",
    )  # fmt: skip


def named_times(calls: Sequence[Callable[[], Any]], rounds: int = 3) -> dict[str, float]:
    """Median microseconds of each kernel of a call; `products` adds up those that are."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(rounds):
            for call in calls:
                call()
        torch.cuda.synchronize()
    events = [e for e in trace.events() if str(e.device_type) == "DeviceType.CUDA"]
    events = sorted((e for e in events if "Mem" not in e.name), key=lambda e: e.time_range.start)
    each = len(events) // (rounds * len(calls))
    found: dict[str, float] = {"products": 0.0, "gate_up": 0.0, "down": 0.0}
    names = [event.name for event in events[:each]]
    inner = [place for place, name in enumerate(names) if name not in AROUND]
    for place, name in enumerate(names):
        times = [float(e.time_range.end - e.time_range.start) for e in events[place::each]]
        middle = statistics.median(times)
        if name in AROUND:
            found[name] = middle
        else:
            found["gate_up" if place in inner[: len(inner) // 2] else "down"] += middle
    found["products"] = found["gate_up"] + found["down"] + found.get("arrange", 0.0)
    return found


def wanted(layer: moe.Layer, batch: Batch) -> Tensor:
    x, ids, weights = batch
    return reference.fused_moe(
        x.float(), ids, weights, layer.arena, layer.blocks["gate_up"].pages,
        layer.blocks["down"].pages, lut_dtype=torch.bfloat16, activation="silu",
    )  # fmt: skip


def measure(layer: moe.Layer, batches: list[Batch], plan: str, want: Tensor) -> dict[str, float]:
    """Times of one plan, and its error; infinite if two runs differ."""
    first, second = (run(layer, batches[0], plan) for _ in range(2))
    error = ((first.float() - want).norm() / want.norm()).item()
    if not torch.equal(first, second):
        error = float("inf")
    times = named_times([lambda b=batch: run(layer, b, plan, False) for batch in batches])
    times["layer"] = moe.graph_time(lambda b: run(layer, b, plan), batches, replays=6)
    return times | {"error": error}


def compile_baseline(layer: moe.Layer, tokens: int) -> None:
    """Every tile shape of the bf16 matmul, once."""
    x, ids, _ = layer.batches(tokens)[0]
    for name, top_k in (("gate_up", layer.model.top_k), ("down", 1)):
        rows = x if top_k > 1 else x.new_zeros(ids.numel(), layer.dense[name].shape[2])
        for call in grouped.triton_calls(rows, layer.dense[name], ids, top_k):
            call()


def bench(options: argparse.Namespace) -> list[dict[str, Any]]:
    model = moe.MODELS[options.model]
    layer = moe.Layer(model)
    began = time.perf_counter()
    widths = {f"{b}": moe.alike(model, lambda _, b=b: b) for b in options.bits}
    widths |= {k: moe.alike(model, moe.MIXES[k]) for k in options.mixes}
    extra = ["decode"] if options.decode else []
    plans = {tokens: list(options.plans) for tokens in options.tokens}
    stamp = {
        "model": options.model, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "triton": triton.__version__, "date": datetime.now(UTC).date().isoformat(),
    }  # fmt: skip
    layer.set_bits(moe.alike(model, lambda e: 2 + e % 7))
    with ThreadPoolExecutor(12) as pool:  # compiles
        jobs = {(plan, tokens) for tokens in options.tokens for plan in [*plans[tokens], *extra]}
        done = {job: pool.submit(run, layer, layer.batches(job[1])[0], job[0]) for job in jobs}
        baseline = pool.submit(compile_baseline, layer, max(options.tokens))
        for (plan, tokens), job in done.items():
            if (error := job.exception()) is not None:
                print(f"{tokens} tokens, plan {plan}: {error!r}"[:300])
                plans[tokens] = [name for name in plans[tokens] if name != plan]
        baseline.result()
    torch.cuda.synchronize()
    print(f"compiled in {time.perf_counter() - began:.0f} s", flush=True)
    records = []
    for tokens in options.tokens:
        batches = layer.batches(tokens)
        dense = moe.dense_times(layer, batches)["triton"]
        dense["products"] = dense["gate_up"] + dense["down"]
        dense["layer"] = moe.graph_time(lambda b: moe.dense_layer(layer, b), batches, replays=6)
        records.append(stamp | {"tokens": tokens, "width": "bf16", "plan": "bf16"} | dense)
        for width, bits in widths.items():
            layer.set_bits(bits)
            want = wanted(layer, batches[0])
            for plan in [*plans[tokens], *extra]:
                times = measure(layer, batches, plan, want)
                records.append(stamp | {"tokens": tokens, "width": width, "plan": plan} | times)
                if not times["error"] < 1e-2:
                    print(f"WRONG: {tokens} tokens, {width} bits, {plan}: {times['error']:.1e}")
        print(table([r for r in records if r["tokens"] == tokens]))
        print(f"{tokens} tokens done, {time.perf_counter() - began:.0f} s", flush=True)
        if options.json:
            options.json.write_text(json.dumps(records, indent=1))
    return records


def table(records: list[dict[str, Any]]) -> str:
    """Microseconds of products / layer, in brackets the ratio of products to bf16."""
    widths = list(dict.fromkeys(r["width"] for r in records if r["width"] != "bf16"))
    lines = [f"{'T':<5}{'plan':<16}" + "".join(f"{w:>21}" for w in ["bf16", *widths])]
    for tokens in dict.fromkeys(r["tokens"] for r in records):
        mine = [r for r in records if r["tokens"] == tokens]
        dense = next(r for r in mine if r["width"] == "bf16")
        for plan in dict.fromkeys(r["plan"] for r in mine if r["plan"] != "bf16"):
            cells = [f"{dense['products']:.0f} / {dense['layer']:.0f}"]
            for width in widths:
                r = next((r for r in mine if (r["width"], r["plan"]) == (width, plan)), None)
                if r is None:
                    cells.append("")
                    continue
                ratio = dense["products"] / r["products"]
                cells.append(f"{r['products']:.0f} / {r['layer']:.0f} ({ratio:.2f}x)")
            lines.append(f"{tokens:<5}{plan:<16}" + "".join(f"{cell:>21}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=sorted(moe.MODELS), default="qwen1.5-moe")
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096])
    parser.add_argument("--bits", type=int, nargs="*", default=[2, 3, 4, 6, 8])
    parser.add_argument("--mixes", nargs="*", choices=sorted(moe.MIXES), default=sorted(moe.MIXES))
    parser.add_argument(
        "--plans", nargs="+", default=["chosen"], help="chosen, or such as 160:3.1,2.2"
    )
    parser.add_argument("--decode", action="store_true", help="the kernels of decode steps, too")
    parser.add_argument("--large-tiles", action="store_true", help="of the baseline, none other")
    parser.add_argument("--json", type=Path, help="also write the records here")
    options = parser.parse_args()
    if options.large_tiles:
        grouped.SMALL.clear()
    torch.manual_seed(0)
    print(table(bench(options)))


if __name__ == "__main__":
    main()
