"""Paged attention on a GPU, checked and timed in one run.

    python kernels/bench/attention.py [--forms triton cuda] [--json results.json]

Decode reads every key and value once, so it is measured against the bandwidth of a copy in the
same run; prompts are measured in TFLOP/s, beside torch's own attention over the same keys and
values laid out densely ("flash", "cudnn": those who can; copying pages together is not timed).
Times are medians of graph replays, whose calls rotate through more bytes than the cache holds, as
the layers of a model do. "auto" is what `dispatch` takes. One table comes last.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import triton
from records import about
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from pw_kernels import cuda_attention, dispatch, reference, triton_attention

CACHE_BYTES = 256 << 20  # to rotate through
MOST_TURNS = 64
FORMS: dict[str, Any] = {"auto": dispatch, "triton": triton_attention, "cuda": cuda_attention}
PEERS = ("flash", "cudnn")
MOST_DENSE_SIZE = 256  # of torch's heads


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

    @property
    def operations(self) -> int:
        """Multiplications and additions of what queries see."""
        first = self.context - self.queries + 1
        pairs = sum(min(first + i, self.window or first + i) for i in range(self.queries))
        return 4 * self.sequences * self.heads * self.size * pairs


SHORT = [
    Case(f"decode, {sequences} of {context}", 16, 16, 128, sequences, 1, context, 4, room=8192)
    for context in (150, 1024, 1040, 8192)
    for sequences in (1, 8, 32, 64)
    if sequences * context < 1 << 19
]
CASES = [
    *SHORT,
    Case("decode, Qwen1.5-MoE", 16, 16, 128, 32, 1, 4096, 4),
    Case("decode, Mixtral", 32, 8, 128, 32, 1, 4096, 16),
    Case("decode, Qwen3-30B", 32, 4, 128, 32, 1, 4096, 32),
    Case("decode, one sequence", 16, 16, 128, 1, 1, 32768, 4),
    Case("decode, Gemma 4 with window", 16, 8, 256, 32, 1, 4096, 8, 1024),
    Case("decode, Gemma 4 without", 16, 2, 512, 32, 1, 4096, 8),
    Case("decode, 4 of 8192", 16, 16, 128, 4, 1, 8192, 4),
    Case("decode, heads of 512", 8, 2, 512, 16, 1, 4096, 8),
    Case("prompt, Qwen1.5-MoE", 16, 16, 128, 1, 2048, 2048, 4),
    Case("prompt, Qwen3-30B", 32, 4, 128, 1, 2048, 2048, 32),
    Case("prompt, Gemma 4 with window", 16, 8, 256, 1, 2048, 2048, 8, 1024),
    Case("prompt, Gemma 4 without", 16, 2, 512, 1, 2048, 2048, 8),
    Case("prompt chunk, Mixtral", 32, 8, 128, 2, 1024, 8192, 16),
    Case("prompt chunk, Qwen1.5-MoE", 16, 16, 128, 1, 512, 8192, 4),
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
        self.case = case
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
        self.counters = dispatch.attention_counters(arena.device)

    @cached_property
    def want(self) -> Tensor:
        """What the reference makes of the first turn."""
        return self.call(reference)().float()

    def call(self, form: Any, turn: int = 0) -> Callable[[], Tensor]:
        more = {"counters": self.counters} if form in (dispatch, cuda_attention) else {}
        return lambda: form.paged_attention(*self.turns[turn], **self.options, **more)

    def dense(self, peer: str) -> Callable[[], Tensor] | None:
        """Torch's own attention of a prompt without pages, if it can do that."""
        case, (q, k_pages, v_pages, table, *_) = self.case, self.turns[0]
        if case.queries == 1 or case.size > MOST_DENSE_SIZE:
            return None
        shape = (case.sequences, -1, case.kv_heads, case.size)
        k, v = (pages[table.long()].view(shape)[:, : case.context] for pages in (k_pages, v_pages))
        q = q.view(case.sequences, case.queries, case.heads, case.size)
        scale = self.options["scale"]
        if peer == "flash":
            left = -1 if case.window is None else case.window - 1
            forward = torch.ops.aten._flash_attention_forward  # whose causal mask ends at the end
            return lambda: forward(  # type: ignore[no-any-return]
                q, k, v, None, None, case.queries, case.context, 0.0, case.window is None, False,
                scale=scale, window_size_left=left, window_size_right=0,
            )[0].flatten(0, 1)  # fmt: skip
        if case.window is not None or case.queries != case.context:
            return None
        heads_first = [t.transpose(1, 2) for t in (q, k, v)]

        def cudnn() -> Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                out = scaled_dot_product_attention(
                    *heads_first, is_causal=True, scale=scale, enable_gqa=True
                )
            return out.transpose(1, 2).flatten(0, 1)

        return cudnn

    def calls(self, form: str) -> list[Callable[[], Tensor]]:
        """Of all turns; none if the form cannot take them."""
        if form in PEERS:
            call = self.dense(form)
            return [] if call is None else [call]
        if form == "cuda" and not cuda_attention.fits(*self.turns[0][:4]):
            return []
        return [self.call(FORMS[form], turn) for turn in range(len(self.turns))]


def bench(
    case: Case, form: str, calls: Sequence[Callable[[], Tensor]], want: Tensor, bandwidth: float
) -> dict[str, Any]:
    """One record: microseconds of a call, the relative error of its result, what it makes of it."""
    error = ((calls[0]().float() - want).norm() / want.norm()).item()
    micros = graph_time(list(calls) * -(-10 // len(calls)))
    record = {
        "case": case.name,
        "form": form,
        "us": round(micros, 1),
        "error": float(f"{error:.1e}"),
    }
    if case.queries > 1:
        return record | {"TFLOP/s": round(case.operations / micros / 1e6, 1)}
    return record | {
        "floor us": round(case.bytes_read / bandwidth, 1),
        "TB/s": round(case.bytes_read / micros / 1e6, 2),
        "of copy": round(case.bytes_read / micros / bandwidth, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--forms", nargs="+", choices=[*FORMS, *PEERS])
    parser.set_defaults(forms=["auto", *PEERS])
    parser.add_argument("--json", type=Path, help="also write the records here")
    options = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    records = []
    for case in CASES:
        inputs = Inputs(case)
        records += [
            bench(case, form, calls, inputs.want, bandwidth)
            for form in options.forms
            if (calls := inputs.calls(form))
        ]
    if options.json:
        more = {"triton": triton.__version__, "copy TB/s": round(bandwidth / 1e6, 2)}
        found = about() | more | {"records": records}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(f"copy: {bandwidth / 1e6:.2f} TB/s on {torch.cuda.get_device_name()}")
    for record in records:
        print("  ".join(f"{key} {value}" for key, value in record.items()))


if __name__ == "__main__":
    main()
