"""Routed experts on a GPU: every width beside unquantized weights, checked and timed in one run.

    python kernels/bench/moe.py                       # Qwen1.5-MoE-A2.7B, T = 1, 8, 32, 128
    python kernels/bench/moe.py --model mixtral --tokens 1 16 --bits 3 4 --json results.json

First each kernel is compared with the torch reference on the same random planes and tables, then
all are timed: the median duration of the kernel itself, as the profiler reports it, over calls
that rotate through the experts (so that nothing is read from the cache that a model would not
find there), with launches kept apart. "layer" is the whole of it, routing and last sum included,
replayed from a CUDA graph as a model does, where launches overlap; the bf16 layer beside it has the
same routing and last sum. One table comes last.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grouped
import torch
import triton
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from pw_kernels import cuda_dense, cuda_moe, cuda_prompts, nvrtc, reference
from pw_kernels.bitplane import lut_bytes, padded_rows, plane_bytes
from pw_kernels.pages import NO_PAGE, WeightPages

PAGE_BYTES = 65536
MIN_BITS, MAX_BITS = 2, 8


@dataclass(frozen=True)
class Model:
    experts: int
    top_k: int
    hidden: int
    inner: int

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of each module."""
        return {"gate_up": (2 * self.inner, self.hidden), "down": (self.hidden, self.inner)}


MODELS = {
    "qwen1.5-moe": Model(60, 4, 2048, 1408),
    "mixtral": Model(8, 2, 4096, 14336),
    "gemma4-26b": Model(128, 8, 2816, 704),
    "qwen3-30b": Model(128, 8, 2048, 768),
}
MIXES: dict[str, Callable[[int], int]] = {
    "3/4": lambda e: 3 + e % 2,
    "2..4": lambda e: 2 + e % 3,
    "2..8": lambda e: 2 + e % 7,
}
Widths = Mapping[str, Sequence[int]]  # by module and expert


def planned(model: Model, mean_bits: int, spread: float = 1.5) -> Widths:
    """Widths as a planner gives them within the bytes of a uniform width: the least loss.

    Losses fall by four a bit; their scales are log-normal with `spread` as the standard deviation
    of the logarithm, as the dummy weights of the engine have (`pw/engine/start/dummy.py`).
    """
    middle = (torch.arange(model.experts) + 0.5) / model.experts
    scale = torch.special.ndtri(middle.double()).mul(spread).exp()
    scales = {m: scale[torch.randperm(model.experts)].tolist() for m in model.shapes}
    widths = {m: [MIN_BITS] * model.experts for m in model.shapes}
    room = sum(
        model.experts * (block_bytes(*shape, mean_bits) - block_bytes(*shape, MIN_BITS))
        for shape in model.shapes.values()
    )

    def gain(module: str, expert: int) -> tuple[float, int]:
        """Loss a byte that one more bit takes away, and the bytes."""
        bits = widths[module][expert]
        more = block_bytes(*model.shapes[module], bits + 1)
        more -= block_bytes(*model.shapes[module], bits)
        return scales[module][expert] * 0.25**bits / more, more

    blocks = [(*gain(m, e), m, e) for m in model.shapes for e in range(model.experts)]
    while blocks:
        _, more, module, expert = best = max(blocks)
        blocks.remove(best)
        if more > room:
            continue
        room -= more
        widths[module][expert] += 1
        if widths[module][expert] < MAX_BITS:
            blocks.append((*gain(module, expert), module, expert))
    return widths


def alike(model: Model, width: Callable[[int], int]) -> Widths:
    """The same widths for both modules."""
    return {module: [width(e) for e in range(model.experts)] for module in model.shapes}


def block_bytes(rows: int, cols: int, bits: int) -> int:
    """Bytes of a block's planes and table."""
    return padded_rows(rows) * cols * bits // 8 + lut_bytes(rows, bits)


class Blocks:
    """All blocks of one module at every width: random planes, random tables, scattered pages."""

    def __init__(self, rows: int, cols: int, experts: int, arena: Tensor, ids: Tensor) -> None:
        self.rows, self.cols, self.experts = rows, cols, experts
        plane_pages = -(-plane_bytes(rows, cols) // PAGE_BYTES)
        planes = ids[: experts * MAX_BITS * plane_pages]
        rest = ids[planes.numel() :]
        self.tables = {}
        for bits in range(2, MAX_BITS + 1):
            pages = -(-lut_bytes(rows, bits) // PAGE_BYTES)
            mine, rest = rest[: experts * pages], rest[experts * pages :]
            entries = torch.randn(len(mine), PAGE_BYTES // 2, device=arena.device) * cols**-0.5
            arena[mine.long()] = entries.to(torch.bfloat16).view(torch.uint8)
            self.tables[bits] = mine.view(experts, pages)
        longest = self.tables[MAX_BITS].shape[1]
        device = arena.device
        self.pages = WeightPages(
            rows,
            cols,
            torch.zeros(experts, dtype=torch.int32, device=device),
            planes.view(experts, MAX_BITS, plane_pages).contiguous(),
            torch.full((experts, longest), NO_PAGE, dtype=torch.int32, device=device),
            torch.zeros(experts, dtype=torch.int32, device=device),
        )

    @staticmethod
    def pages_needed(rows: int, cols: int, experts: int) -> int:
        tables = sum(-(-lut_bytes(rows, b) // PAGE_BYTES) for b in range(2, MAX_BITS + 1))
        return experts * (MAX_BITS * -(-plane_bytes(rows, cols) // PAGE_BYTES) + tables)

    def set_bits(self, bits: Sequence[int]) -> None:
        self.pages.bits.copy_(torch.tensor(bits))
        for expert, width in enumerate(bits):
            table = self.tables[width][expert]
            self.pages.lut_pages[expert, : len(table)] = table

    def bytes_read(self, bits: Sequence[int], touched: set[int]) -> int:
        """Bytes of planes and tables of the experts that have tokens."""
        return sum(block_bytes(self.rows, self.cols, bits[e]) for e in touched)


class Layer:
    """One MoE layer: blocks of both modules, the same experts unquantized, inputs that rotate."""

    def __init__(self, model: Model, device: str = "cuda") -> None:
        self.model = model
        needed = {
            name: Blocks.pages_needed(*shape, model.experts) for name, shape in model.shapes.items()
        }
        total = sum(needed.values())
        self.arena = torch.randint(0, 256, (total, PAGE_BYTES), dtype=torch.uint8, device=device)
        ids = torch.randperm(total, device=device).int()
        self.blocks = {}
        for name, (rows, cols) in model.shapes.items():
            mine, ids = ids[: needed[name]], ids[needed[name] :]
            self.blocks[name] = Blocks(rows, cols, model.experts, self.arena, mine)
        self.dense = {
            name: torch.randn(model.experts, *shape, dtype=torch.bfloat16, device=device)
            * shape[1] ** -0.5
            for name, shape in model.shapes.items()
        }

    def set_bits(self, widths: Widths) -> None:
        for name, blocks in self.blocks.items():
            blocks.set_bits(widths[name])

    def batches(self, tokens: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Inputs [T, H], ids and weights [T, k]; together the batches touch all experts."""
        model, device = self.model, self.arena.device
        count = max(2, -(-model.experts // (tokens * model.top_k)))
        order = torch.cat([torch.randperm(model.experts) for _ in range(tokens + 1)])
        batches = []
        for i in range(count):
            if tokens == 1:  # in turn, so that every expert is read once in a round
                ids = order[i * model.top_k : (i + 1) * model.top_k][None]
            else:
                ids = torch.rand(tokens, model.experts).argsort(1)[:, : model.top_k]
            x = torch.randn(tokens, model.hidden, dtype=torch.bfloat16, device=device)
            weights = torch.rand(tokens, model.top_k, device=device)
            batches.append((x, ids.to(device), weights))
        return batches

    def run(
        self, batch: tuple[Tensor, Tensor, Tensor], plan: cuda_moe.Plan | None = None
    ) -> Tensor:
        x, ids, weights = batch
        return cuda_moe.fused_moe(
            x, ids, weights, self.arena, self.blocks["gate_up"].pages, self.blocks["down"].pages,
            lut_dtype=torch.bfloat16, activation="silu", plan=plan,
        )  # fmt: skip

    def error(self, batch: tuple[Tensor, Tensor, Tensor], plan: cuda_moe.Plan | None) -> float:
        x, ids, weights = batch
        want = reference.fused_moe(
            x.float(), ids, weights, self.arena, self.blocks["gate_up"].pages,
            self.blocks["down"].pages, lut_dtype=torch.bfloat16, activation="silu",
        )  # fmt: skip
        got = self.run(batch, plan)
        repeat = self.run(batch, plan)
        if not torch.equal(got, repeat):
            return float("inf")
        return ((got.float() - want).norm() / want.norm()).item()


def kernel_times(calls: Sequence[Callable[[], Any]], rounds: int = 4) -> list[list[float]]:
    """Microseconds of each kernel launched, [calls * rounds][kernels of a call] in order."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(rounds):
            for call in calls:
                call()
        torch.cuda.synchronize()
    events = [e for e in trace.events() if str(e.device_type) == "DeviceType.CUDA"]
    events = [e for e in events if "Mem" not in e.name]
    events.sort(key=lambda e: e.time_range.start)
    times = [float(e.time_range.end - e.time_range.start) for e in events]
    each = len(times) // (rounds * len(calls))
    return [times[i : i + each] for i in range(0, len(times), each)]


def graph_time(run: Callable[[Any], Tensor], batches: Sequence[Any], replays: int = 30) -> float:
    """Median microseconds of one call, from a CUDA graph of a call for each batch."""
    for batch in batches:
        run(batch)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [run(batch) for batch in batches]
    times = []
    for _ in range(replays + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(results))
    return statistics.median(times[3:])


def dense_layer(layer: Layer, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """The unquantized layer in the form that models use."""
    gate_up, down = layer.dense["gate_up"], layer.dense["down"]
    return cuda_dense.dense_moe(*batch, gate_up, down, activation="silu")


def kept_apart(
    model: Model, tokens: int, widths: tuple[int, int] = (MIN_BITS, MAX_BITS)
) -> cuda_moe.Plan | None:
    """The plan that would be chosen, but no launch begins before the last has ended.

    None where another form than that of decode steps is chosen. `widths`: as for `choose_plan`.
    """
    slots = tokens * model.top_k
    if cuda_prompts.wins(slots, model.experts, torch.device("cuda", 0)):
        return None  # the form for prompts: see prompts.py
    if slots >= cuda_moe.PROMPT_SLOTS * model.experts:
        return None
    plan = cuda_moe.choose_plan(slots, model.experts, nvrtc.shared_bytes(0), widths)
    return replace(plan, overlap=False)


def module_times(layer: Layer, batches: Sequence[Any], plan: cuda_moe.Plan) -> dict[str, float]:
    """Median microseconds of route, if any, gate_up, down and combine; classes are added up."""
    rows = kernel_times([lambda b=batch: layer.run(b, plan) for batch in batches])
    median = [statistics.median(column) for column in zip(*rows, strict=True)]
    listed = len(median) % 2 == 0  # a single token needs no lists
    half = (len(median) - 1) // 2
    return {
        "route": median[0] if listed else 0.0,
        "gate_up": sum(median[listed : listed + half]),
        "down": sum(median[listed + half : -1]),
        "combine": median[-1],
    }


def dense_times(layer: Layer, batches: Sequence[Any]) -> dict[str, dict[str, float]]:
    """Best Triton grouped matmul and torch's, microseconds by module."""
    model = layer.model
    found: dict[str, dict[str, float]] = {"triton": {}, "torch": {}}
    for name, (_, cols) in model.shapes.items():
        inputs = []
        for x, ids, _ in batches:
            rows = x if name == "gate_up" else torch.randn(ids.numel(), cols, device=x.device).to(x)
            inputs.append((rows, layer.dense[name], ids, model.top_k if name == "gate_up" else 1))
        calls = [list(grouped.triton_calls(*each)) for each in inputs]
        best = min(
            statistics.median(t for row in kernel_times(list(variant), 3) for t in row)
            for variant in zip(*calls, strict=True)
        )
        found["triton"][name] = best
        try:
            library = [grouped.torch_call(*each) for each in inputs]
            found["torch"][name] = statistics.median(sum(r) for r in kernel_times(library, 3))
        except (RuntimeError, AttributeError) as error:
            print(f"torch grouped matmul does not run here: {error}")
            found["torch"][name] = float("nan")
    return found


def bench(options: argparse.Namespace) -> list[dict[str, Any]]:
    model = MODELS[options.model]
    layer = Layer(model)
    widths = {f"{b}": alike(model, lambda _, b=b: b) for b in options.bits}
    if options.mixes:
        widths |= {name: alike(model, width) for name, width in MIXES.items()}
        widths |= {f"planned {b}": planned(model, b) for b in (3, 4)}
    records = []
    stamp = {
        "model": options.model,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.now(UTC).date().isoformat(),
    }
    batches_of = {tokens: layer.batches(tokens) for tokens in options.tokens}
    with nvrtc.Rehearsal():
        for tokens, batches in batches_of.items():
            if tokens * model.top_k < cuda_moe.PROMPT_SLOTS * model.experts:
                layer.run(batches[0])
    for tokens, batches in batches_of.items():
        dense: dict[str, dict[str, float]] = {"triton": {}}
        if options.dense:
            dense = dense_times(layer, batches)
            dense["triton"]["layer"] = graph_time(lambda b: dense_layer(layer, b), batches)
        for kind, times in dense.items():
            for module, micros in times.items():
                records.append(
                    stamp
                    | {"tokens": tokens, "width": f"bf16 {kind}", "module": module, "us": micros}
                )
        touched = [set(ids.flatten().tolist()) for _, ids, _ in batches]
        for width, bits in widths.items():
            layer.set_bits(bits)
            error = layer.error(batches[0], None)
            if not error < 1e-2:
                print(f"WRONG: {tokens} tokens, width {width}, relative error {error:.1e}")
                continue
            plan = kept_apart(model, tokens)
            times = {} if plan is None else module_times(layer, batches, plan)
            times["layer"] = graph_time(layer.run, batches)
            for module, micros in times.items():
                record = {"tokens": tokens, "width": width, "module": module, "us": micros}
                if module in layer.blocks:
                    blocks = layer.blocks[module]
                    read = statistics.mean(blocks.bytes_read(bits[module], t) for t in touched)
                    record |= {"bytes": int(read), "error": error}
                if module in dense["triton"]:
                    record["ratio"] = dense["triton"][module] / micros
                records.append(stamp | record)
        print(f"{tokens} tokens done", flush=True)
    return records


def table(records: list[dict[str, Any]]) -> str:
    """Microseconds and, in brackets, times faster than the bf16 Triton grouped matmul."""
    by = {(r["tokens"], r["module"], r["width"]): r for r in records}
    widths = list(dict.fromkeys(r["width"] for r in records))
    lines = ["T    module   " + "".join(f"{w:>15}" for w in widths)]
    for tokens in dict.fromkeys(r["tokens"] for r in records):
        for module in ("gate_up", "down", "layer", "route", "combine"):
            cells = []
            for width in widths:
                r = by.get((tokens, module, width))
                text = "" if r is None else f"{r['us']:.1f}"
                if r is not None and "ratio" in r:
                    text += f" ({r['ratio']:.2f}x)"
                cells.append(f"{text:>15}")
            lines.append(f"{tokens:<4} {module:<9}" + "".join(cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=sorted(MODELS), default="qwen1.5-moe")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--bits", type=int, nargs="*", default=list(range(2, 9)))
    parser.add_argument("--mixes", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--dense", action=argparse.BooleanOptionalAction, default=True, help="unquantized, too"
    )
    parser.add_argument("--json", type=Path, help="also write the records here")
    options = parser.parse_args()
    torch.manual_seed(0)
    records = bench(options)
    if options.json:
        options.json.write_text(json.dumps(records, indent=1))
    print(table(records))


if __name__ == "__main__":
    main()
