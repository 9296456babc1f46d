"""Time the kernels of this machine, each checked against the reference in the same run.

    python kernels/bench/bench_moe.py --device cpu
    python kernels/bench/bench_moe.py --device cuda --experts 60 --top-k 4 \\
        --hidden 2048 --inner 1408

Prints one JSON object a line: minimum and median microseconds of a call, and its relative error.
"""

import argparse
import json
import time
from collections.abc import Callable

import torch

from pw_kernels import dispatch, reference, testing
from pw_kernels.pages import WeightPages


def measure(call: Callable[[], object], device: str, repeats: int) -> tuple[float, float]:
    """Minimum and median microseconds of a call; on a GPU of a captured graph of it."""
    call()
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        call = graph.replay
    times = []
    for _ in range(repeats):
        _wait(device)
        begin = time.perf_counter()
        call()
        _wait(device)
        times.append(1e6 * (time.perf_counter() - begin))
    return min(times), sorted(times)[len(times) // 2]


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def place(pages: WeightPages, device: str) -> WeightPages:
    tensors = (pages.bits, pages.plane_pages, pages.lut_pages, pages.lut_offset)
    return WeightPages(pages.rows, pages.cols, *(tensor.to(device) for tensor in tensors))


def bench_moe(options: argparse.Namespace, bits: int, tokens: int) -> dict[str, object]:
    experts, hidden, inner = options.experts, options.hidden, options.inner
    page_bytes = 4096 if hidden < 1024 else 65536
    pages = 8 + experts * (2 * inner * hidden + hidden * inner) * (bits + 1) // (8 * page_bytes)
    arena = testing.ScatteredArena(2 * pages + 16 * experts * (2 + bits), page_bytes)
    shapes = ((2 * inner, hidden), (hidden, inner))
    blocks = [
        testing.random_blocks(arena, *shape, [bits] * experts, max_bits=bits) for shape in shapes
    ]
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    ids = torch.stack([torch.randperm(experts)[: options.top_k] for _ in range(tokens)])
    args = [torch.randn(tokens, hidden).to(dtype), ids, torch.rand(ids.shape), arena.data]
    x, ids, weights, data = (tensor.to(options.device) for tensor in args)
    gate_up, down = (place(block, options.device) for block in blocks)

    def call() -> torch.Tensor:
        return dispatch.fused_moe(
            x, ids, weights, data, gate_up, down, lut_dtype=torch.bfloat16, activation="silu"
        )

    want = reference.fused_moe(
        x.float(), ids, weights, data, gate_up, down, lut_dtype=torch.bfloat16, activation="silu"
    )
    low, median = measure(call, options.device, options.repeats)
    error = ((call().float() - want).norm() / want.norm()).item()
    return {"kernel": "moe", "bits": bits, "tokens": tokens, **_figures(low, median, error)}


def bench_attention(options: argparse.Namespace, sequences: int, context: int) -> dict[str, object]:
    heads, size, page_tokens = options.heads, 64, 16
    blocks = context // page_tokens
    arena = torch.randn(sequences * blocks, 2, page_tokens, heads, size, device=options.device)
    tables = torch.randperm(sequences * blocks, device=options.device).int().view(sequences, blocks)
    starts = torch.arange(sequences + 1, device=options.device).int()
    lengths = torch.full((sequences,), context, device=options.device).int()
    q = torch.randn(sequences, heads, size, device=options.device)
    args = (q, arena[:, 0], arena[:, 1], tables, starts, lengths)

    def call() -> torch.Tensor:
        return dispatch.paged_attention(*args, scale=0.125)

    want = reference.paged_attention(*args, scale=0.125)
    low, median = measure(call, options.device, options.repeats)
    error = ((call() - want).norm() / want.norm()).item()
    figures = _figures(low, median, error)
    return {"kernel": "attention", "sequences": sequences, "context": context, **figures}


def _figures(low: float, median: float, error: float) -> dict[str, float]:
    return {
        "min_us": round(low, 1),
        "median_us": round(median, 1),
        "relative_error": float(f"{error:.1e}"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--inner", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 3, 4, 5, 6, 7, 8])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--repeats", type=int, default=100)
    options = parser.parse_args()
    torch.manual_seed(0)
    for bits in options.bits:
        for tokens in options.tokens:
            print(json.dumps(bench_moe(options, bits, tokens)), flush=True)
    if options.device == "cpu":
        for sequences in (1, 8):
            print(json.dumps(bench_attention(options, sequences, 512)), flush=True)


if __name__ == "__main__":
    main()
