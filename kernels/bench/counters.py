"""Counters of the experts' kernels by Nsight Compute: which unit is busy, what warps wait for.

    python kernels/bench/counters.py --json FILE          # Qwen1.5-MoE-A2.7B, T = 32
    python kernels/bench/counters.py --model mixtral --tokens 1 --bits 3

Starts itself under `ncu` (CUDA's toolkit brings it). Launches are alone on the device, the cache is
emptied before each. Percent are of what the unit can do at most; "waiting" is how many warps wait
for each instruction that is issued, by reason. Clocks are left alone.
"""

import argparse
import csv
import json
import subprocess
import sys
from datetime import UTC, datetime
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


def metric(reason: str) -> str:
    return f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio"


def launches(options: argparse.Namespace) -> None:
    """What ncu watches: both modules at each width, after a call that compiles."""
    import torch
    from experts_shape import Shape

    shape = Shape(options.model, [options.tokens])
    batch = shape.batches[options.tokens][0]
    for width in shape.widths:
        if width.name not in options.bits:
            continue
        shape.take(width, options.tokens)
        shape.apart(batch)
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        shape.apart(batch)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen1.5-moe")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--bits", nargs="+", default=["2", "3", "4", "6", "8"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.launch:
        launches(options)
        return
    again = [sys.executable, __file__, "--launch", "--model", options.model]
    again += ["--tokens", str(options.tokens), "--bits", *options.bits]
    metrics = ",".join([*METRICS.values(), *map(metric, WAITS)])
    command = ["ncu", "--clock-control", "none", "--profile-from-start", "off", "-k"]
    command += ["regex:experts", "--metrics", metrics, "--csv", "--page", "raw", *again]
    done = subprocess.run(command, capture_output=True, text=True)
    found = read(done.stdout)
    each = len(found) // len(options.bits)
    for place, record in enumerate(found):
        module = "gate_up" if place % each < each / 2 else "down"
        record |= {"width": options.bits[place // each], "module": module}
        values = [f"{record[name]:.4g}" for name in (*METRICS, *WAITS) if name in record]
        print(record["width"], module, record["block"], record["grid"], *values, sep=" | ")
    print("width | module | block | grid", *METRICS, *WAITS, sep=" | ")
    if options.json:
        about = {
            "model": options.model, "tokens": options.tokens,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }  # fmt: skip
        options.json.write_text(json.dumps(about | {"launches": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
