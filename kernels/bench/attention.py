"""Paged attention on a GPU, checked and timed in one run.

    python kernels/bench/attention.py [--json results.json]

Decode reads every key and value once, so it is measured against the bandwidth of a copy in the
same run; prompts are measured in TFLOP/s. Times are medians of graph replays over more bytes than
the cache holds. One table comes last.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pw_kernels import reference, triton_attention


@dataclass(frozen=True)
class Case:
    name: str
    heads: int
    kv_heads: int
    size: int
    sequences: int
    queries: int
    context: int
    page_tokens: int
    window: int | None = None
    room: int | None = None  # tokens that a block table has place for


SHORT = [
    Case(f"decode, {sequences} of {context}", 16, 16, 128, sequences, 1, context, 4, room=8192)
    for context in (150, 1024, 8192)
    for sequences in (1, 8, 32)
]
CASES = [
    *SHORT,
    Case("decode, Qwen1.5-MoE", 16, 16, 128, 32, 1, 4096, 4),
    Case("decode, Mixtral", 32, 8, 128, 32, 1, 4096, 16),
    Case("decode, Qwen3-30B", 32, 4, 128, 32, 1, 4096, 32),
    Case("decode, one sequence", 16, 16, 128, 1, 1, 32768, 4),
    Case("decode, heads of 512", 8, 2, 512, 16, 1, 4096, 8),
    Case("decode, window 1024", 16, 8, 256, 32, 1, 4096, 8, 1024),
    Case("prompt, Qwen1.5-MoE", 16, 16, 128, 1, 2048, 2048, 4),
    Case("prompt chunk, Mixtral", 32, 8, 128, 2, 1024, 8192, 16),
]


def graph_time(call: Callable[[], Any]) -> float:
    """Median microseconds of a call, replayed as a graph."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            call()
    times = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(100 * begin.elapsed_time(end))
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes read and written in a microsecond by a large copy kernel."""
    source = torch.zeros(1 << 30, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / graph_time(lambda: torch.neg(source, out=target))


def bench(case: Case, bandwidth: float) -> dict[str, Any]:
    blocks = -(-(case.room or case.context) // case.page_tokens)
    pages = case.sequences * blocks
    shape = (pages, 2, case.page_tokens, case.kv_heads, case.size)
    arena = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    tables = torch.randperm(pages, device="cuda").int().view(case.sequences, blocks)
    starts = torch.arange(case.sequences + 1, device="cuda").int() * case.queries
    lengths = torch.full((case.sequences,), case.context, device="cuda").int()
    rows = case.sequences * case.queries
    q = torch.randn(rows, case.heads, case.size, dtype=torch.bfloat16, device="cuda")
    args = (q, arena[:, 0], arena[:, 1], tables, starts, lengths)
    options = {"scale": case.size**-0.5, "window": case.window}
    want = reference.paged_attention(*args, **options).float()
    got = triton_attention.paged_attention(*args, **options).float()
    micros = graph_time(lambda: triton_attention.paged_attention(*args, **options))
    seen = min(case.context, case.window or case.context)
    record = {
        "case": case.name,
        "us": round(micros, 1),
        "error": float(f"{((got - want).norm() / want.norm()).item():.1e}"),
    }
    if case.queries == 1:
        read = case.sequences * seen * case.kv_heads * case.size * 4
        return record | {
            "TB/s": round(read / micros / 1e6, 2),
            "of copy": round(read / micros / bandwidth, 2),
        }
    pairs = sum(case.context - case.queries + i + 1 for i in range(case.queries))
    work = 4 * case.sequences * case.heads * case.size * pairs
    return record | {"TFLOP/s": round(work / micros / 1e6, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="also write the records here")
    options = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    records = [bench(case, bandwidth) for case in CASES]
    if options.json:
        options.json.write_text(json.dumps(records, indent=1))
    print(f"copy: {bandwidth / 1e6:.2f} TB/s on {torch.cuda.get_device_name()}")
    for record in records:
        print("  ".join(f"{key} {value}" for key, value in record.items()))


if __name__ == "__main__":
    main()
