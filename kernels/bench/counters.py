"""Counters of kernels by Nsight Compute: which unit is busy, what warps wait for.

    python kernels/bench/counters.py --json FILE          # experts of Qwen1.5-MoE-A2.7B, T = 32
    python kernels/bench/counters.py --model mixtral --tokens 1 --bits 3
    python kernels/bench/counters.py --of attention       # or products

Starts itself under `ncu` (CUDA's toolkit brings it). Launches are alone on the device, the cache is
emptied before each. Percent are of what the unit can do at most; "waiting" is how many warps wait
for each instruction that is issued, by reason. Clocks are left alone. Prints Markdown.
"""

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ACTIVE, ELAPSED = ".avg.pct_of_peak_sustained_active", ".avg.pct_of_peak_sustained_elapsed"
METRICS = {
    "us": "gpu__time_duration.sum",
    "issue": "smsp__issue_active" + ACTIVE,
    "ALU": "sm__inst_executed_pipe_alu" + ACTIVE,
    "FMA": "sm__inst_executed_pipe_fma" + ACTIVE,
    "LSU": "sm__inst_executed_pipe_lsu" + ACTIVE,
    "matrix": "sm__inst_executed_pipe_tensor" + ACTIVE,
    "shared memory": "l1tex__data_pipe_lsu_wavefronts_mem_shared" + ELAPSED,
    "L2": "lts__throughput" + ELAPSED,
    "DRAM": "dram__throughput" + ELAPSED,
    "bytes read": "dram__bytes_read.sum",
    "instructions": "smsp__inst_executed.sum",
    "bank conflicts": "l1tex__data_bank_conflicts_pipe_lsu.sum",
    "warps, %": "sm__warps_active" + ACTIVE,
}
WAITS = ("long_scoreboard", "short_scoreboard", "math_pipe_throttle", "barrier", "not_selected")
WAITS += ("mio_throttle", "lg_throttle", "wait")
UNITS = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}
NAMES = {"experts": "experts", "attention": "^attention", "products": "product"}  # of kernels
ATTENTION = (  # cases of attention.py
    "decode, Qwen1.5-MoE", "decode, Mixtral", "decode, Qwen3-30B", "decode, Gemma 4 with window",
    "decode, Gemma 4 without", "decode, one sequence", "prompt, Qwen1.5-MoE",
    "prompt chunk, Mixtral",
)  # fmt: skip
Watched = tuple[dict[str, Any], Callable[[], Any]]  # what it is, and a call of it


def metric(reason: str) -> str:
    return f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio"


def experts(options: argparse.Namespace) -> Iterator[Watched]:
    """Both modules of a layer at each width."""
    from experts_shape import Shape

    shape = Shape(options.model, [options.tokens])
    batch = shape.batches[options.tokens][0]
    for width in shape.widths:
        if width.name in options.bits:
            shape.take(width, options.tokens)
            what = {"model": options.model, "tokens": options.tokens, "width": width.name}
            yield what, lambda: shape.apart(batch)


def attention(_: argparse.Namespace) -> Iterator[Watched]:
    import attention as bench

    for case in bench.CASES:
        if case.name in ATTENTION:
            inputs = bench.Inputs(case)
            yield {"case": case.name, "floor bytes": case.bytes_read}, inputs.calls("auto")[0]


def products(_: argparse.Namespace) -> Iterator[Watched]:
    import products as bench

    for tokens in (1, 8):
        for shape in bench.SHAPES:
            inputs = bench.Inputs(shape, tokens, 1)
            plan, *_ = bench.plans_of(shape)
            what = {"product": shape.name, "tokens": tokens, "weight bytes": 0}
            what["weight bytes"] = inputs.weights[0].nbytes
            yield what, lambda i=inputs, p=plan: i.run(i.weights[0], plan=p)


def launches(options: argparse.Namespace) -> None:
    """What ncu watches: each call once, after one that compiles."""
    import torch
    from records import about

    torch.manual_seed(0)
    watched: list[dict[str, Any]] = []
    for what, call in {"experts": experts, "attention": attention, "products": products}[
        options.of
    ](options):
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        watched.append(what)
    options.launch.write_text(json.dumps(about() | {"watched": watched}))


def read(text: str) -> list[dict[str, Any]]:
    """Counters of each launch, from ncu's table: a line of names, one of units, one a launch."""
    rows = list(csv.DictReader(line for line in text.splitlines() if line.startswith('"')))
    if len(rows) < 2:
        raise RuntimeError(text[-2000:])
    units, names = rows[0], METRICS | {reason: metric(reason) for reason in WAITS}
    return [
        {"block": row["Block Size"], "grid": row["Grid Size"]}
        | {
            name: float(row[key].replace(",", "")) * UNITS.get(units[key], 1.0)
            for name, key in names.items()
            if row.get(key)
        }
        for row in rows[1:]
    ]


def table(records: list[dict[str, Any]]) -> Iterator[str]:
    """Markdown, a line for each launch."""
    columns = list(dict.fromkeys(key for record in records for key in record))
    yield "| " + " | ".join(columns) + " |"
    yield "|---" * len(columns) + "|"
    for record in records:
        cells = [record.get(name, "") for name in columns]
        yield (
            "| "
            + " | ".join(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells)
            + " |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--of", choices=list(NAMES), default="experts")
    parser.add_argument("--model", default="qwen1.5-moe", help="of experts")
    parser.add_argument("--tokens", type=int, default=32, help="of experts")
    parser.add_argument("--bits", nargs="+", default=["2", "3", "4", "6", "8"], help="of experts")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--launch", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.launch:
        launches(options)
        return
    metrics = ",".join([*METRICS.values(), *map(metric, WAITS)])
    with tempfile.TemporaryDirectory() as folder:
        about = Path(folder) / "about.json"
        again = [sys.executable, __file__, "--launch", str(about), "--of", options.of, "--model"]
        again += [options.model, "--tokens", str(options.tokens), "--bits", *options.bits]
        command = ["ncu", "--clock-control", "none", "--profile-from-start", "off", "-k"]
        command += [f"regex:{NAMES[options.of]}", "--metrics", metrics, "--csv", "--page", "raw"]
        done = subprocess.run([*command, *again], capture_output=True, text=True)
        if done.returncode or not about.exists():
            raise RuntimeError((done.stdout + done.stderr)[-2000:])
        record = json.loads(about.read_text())
    found, watched = read(done.stdout), record.pop("watched")
    each = len(found) // len(watched)
    for place, counted in enumerate(found):
        what = watched[place // each]
        if options.of == "experts":
            what = what | {"module": "gate_up" if place % each < each / 2 else "down"}
        found[place] = what | counted
    print("\n".join(table(found)))
    if options.json:
        options.json.write_text(json.dumps(record | {"launches": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
