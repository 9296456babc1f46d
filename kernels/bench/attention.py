"""Paged attention on a GPU, checked and timed in one run.

    python kernels/bench/attention.py [--forms triton cuda] [--json results.json]

Decode reads every key and value once, so it is measured against the bandwidth of a copy in the
same run; prompts are measured in TFLOP/s. Times are medians of graph replays, whose calls rotate
through more bytes than the cache holds, as the layers of a model do. "auto" is what `dispatch`
takes. One table comes last.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pw_kernels import cuda_attention, dispatch, reference, triton_attention

CACHE_BYTES = 256 << 20  # to rotate through
MOST_TURNS = 64
FORMS: dict[str, Any] = {"auto": dispatch, "triton": triton_attention, "cuda": cuda_attention}


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

    @property
    def bytes_read(self) -> int:
        """Keys and values of all sequences, once."""
        seen = min(self.context, self.window or self.context)
        return self.sequences * seen * self.kv_heads * self.size * 4


SHORT = [
    Case(f"decode, {sequences} of {context}", 16, 16, 128, sequences, 1, context, 4, room=8192)
    for context in (150, 1024, 8192)
    for sequences in (1, 8, 32, 64)
    if sequences * context < 1 << 19
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


def graph_time(calls: Sequence[Callable[[], Any]]) -> float:
    """Median microseconds of a call, from graphs of all of them."""
    for call in calls:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1000 * begin.elapsed_time(end) / len(calls))
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes read and written in a microsecond by a large copy kernel."""
    source = torch.zeros(1 << 30, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / graph_time([lambda: torch.neg(source, out=target)] * 10)


class Inputs:
    """What the layers of a model give to attention in turn: the same queries, other pages."""

    def __init__(self, case: Case) -> None:
        turns = 1 if case.queries > 1 else min(MOST_TURNS, -(-CACHE_BYTES // case.bytes_read))
        blocks = -(-case.context // case.page_tokens)
        pages = turns * case.sequences * blocks
        shape = (pages, 2, case.page_tokens, case.kv_heads, case.size)
        arena = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
        width = -(-(case.room or case.context) // case.page_tokens)
        tables = torch.zeros(turns, case.sequences, width, dtype=torch.int32, device="cuda")
        order = torch.randperm(pages, device="cuda").int()
        tables[:, :, :blocks] = order.view(turns, case.sequences, blocks)
        starts = torch.arange(case.sequences + 1, device="cuda").int() * case.queries
        lengths = torch.full((case.sequences,), case.context, device="cuda").int()
        rows = case.sequences * case.queries
        q = torch.randn(rows, case.heads, case.size, dtype=torch.bfloat16, device="cuda")
        self.turns = [(q, arena[:, 0], arena[:, 1], table, starts, lengths) for table in tables]
        self.options = {"scale": case.size**-0.5, "window": case.window}
        self.want = self.call(reference)().float()

    def call(self, form: Any, turn: int = 0) -> Callable[[], Tensor]:
        return lambda: form.paged_attention(*self.turns[turn], **self.options)

    def measure(self, form: Any) -> tuple[float, float]:
        """Microseconds of a call, and the relative error of its result."""
        error = (self.call(form)().float() - self.want).norm() / self.want.norm()
        calls = [self.call(form, turn) for turn in range(len(self.turns))]
        return graph_time(calls * -(-10 // len(calls))), error.item()


def bench(case: Case, form: str, inputs: Inputs, bandwidth: float) -> dict[str, Any]:
    micros, error = inputs.measure(FORMS[form])
    record = {
        "case": case.name,
        "form": form,
        "us": round(micros, 1),
        "error": float(f"{error:.1e}"),
    }
    if case.queries == 1:
        return record | {
            "TB/s": round(case.bytes_read / micros / 1e6, 2),
            "of copy": round(case.bytes_read / micros / bandwidth, 2),
        }
    pairs = sum(case.context - case.queries + i + 1 for i in range(case.queries))
    work = 4 * case.sequences * case.heads * case.size * pairs
    return record | {"TFLOP/s": round(work / micros / 1e6, 1)}


def takes(form: str, inputs: Inputs) -> bool:
    return form != "cuda" or cuda_attention.fits(*inputs.turns[0][:4])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=["auto"])
    parser.add_argument("--json", type=Path, help="also write the records here")
    options = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    records = []
    for case in CASES:
        inputs = Inputs(case)
        records += [bench(case, f, inputs, bandwidth) for f in options.forms if takes(f, inputs)]
    if options.json:
        options.json.write_text(json.dumps(records, indent=1))
    print(f"copy: {bandwidth / 1e6:.2f} TB/s on {torch.cuda.get_device_name()}")
    for record in records:
        print("  ".join(f"{key} {value}" for key, value in record.items()))


if __name__ == "__main__":
    main()
