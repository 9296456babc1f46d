"""Products of few rows on a GPU, checked and timed beside torch's in one run.

    python kernels/bench/products.py [--tokens 1 2 4 8] [--plans] [--json results.json]

The shapes are those of Qwen1.5-MoE-A2.7B's dense weights. Times are medians of replays of a CUDA
graph whose calls take turns at more weights than the cache holds. `chain` is what a step of 24
layers and the head does with them, without attention and routed experts: by torch's products and
the small kernels of `step`, by the joined kernels, and by these with launches kept apart. With
`--plans` other launch choices are timed, too. Tables come last.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from records import about
from torch import Tensor

from pw_kernels import cuda_products, nvrtc, products
from pw_kernels.product_plans import Plan, choose_plan, constants_of
from pw_kernels.products import Norm

HIDDEN, INNER, LAYERS, VOCABULARY = 2048, 5632, 24, 151936
ROTATED_BYTES = 240 << 20  # of weights that take turns


@dataclass(frozen=True)
class Shape:
    """A weight and what is done around its product."""

    name: str
    rows: int
    cols: int
    norm: bool = False
    bias: bool = False
    inner: int = 0
    add: int = 0  # 0, 1, or 3: two and a share


SHAPES = [
    Shape("qkv", 3 * HIDDEN, HIDDEN, norm=True, bias=True),
    Shape("o", HIDDEN, HIDDEN, add=1),
    Shape("gate_up", 2 * INNER + 64, HIDDEN, norm=True, inner=INNER),
    Shape("down", HIDDEN, INNER, add=3),
    Shape("head", VOCABULARY, HIDDEN),
]


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


class Inputs:
    """Of the products of one shape."""

    def __init__(self, shape: Shape, tokens: int, copies: int) -> None:
        self.shape = shape
        self.x = random(tokens, shape.cols)
        self.weights = [random(shape.rows, shape.cols) / shape.cols**0.5 for _ in range(copies)]
        self.bias = random(shape.rows) if shape.bias else None
        self.norm = Norm(random(shape.cols), 1e-6) if shape.norm else None
        self.add = [random(tokens, shape.rows) for _ in range(min(shape.add, 2))]
        self.share = random(tokens, 64)[:, :1] if shape.add == 3 else None

    def run(self, weight: Tensor, backend: str = "auto", plan: Plan | None = None) -> Any:
        """One call, through the door or with a plan of one's own."""
        shape = self.shape
        if plan is not None and shape.inner:
            return cuda_products.gated_product(
                self.x, weight, shape.inner, "silu", self.bias, self.norm, plan
            )
        if plan is not None:
            return cuda_products.product(
                self.x, weight, self.bias, self.norm, self.add, self.share, plan
            )
        if shape.inner:
            return products.gated_product(
                self.x, weight, shape.inner, "silu", self.bias, norm=self.norm, backend=backend
            )
        return products.product(
            self.x, weight, self.bias, norm=self.norm, add=self.add, share=self.share,
            backend=backend,
        )  # fmt: skip


def graph_time(call: Callable[[], Any], calls: int = 1) -> float:
    """Median microseconds of one of the calls that a call makes, replayed as a graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(9):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1000 * begin.elapsed_time(end) / calls)
    return statistics.median(times[2:])


@contextmanager
def used(most: int) -> Iterator[None]:
    """Take the kernel up to so many tokens."""
    before = cuda_products.FEW_TOKENS
    cuda_products.FEW_TOKENS = most
    try:
        yield
    finally:
        cuda_products.FEW_TOKENS = before


@contextmanager
def launches_apart() -> Iterator[None]:
    """No launch begins before the one before it has ended."""
    launch = nvrtc.Kernel.launch

    def apart(self: Any, *arguments: Any, overlap: bool = False) -> None:
        del overlap
        launch(self, *arguments)

    nvrtc.Kernel.launch = apart  # type: ignore[method-assign]
    try:
        yield
    finally:
        nvrtc.Kernel.launch = launch  # type: ignore[method-assign]


def error(found: Any, expected: Any) -> float:
    """Greatest relative difference of the results of two calls."""
    pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)


def wide(inputs: Inputs, weight: Tensor) -> Any:
    """The result in fp32."""

    def widened(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.float()

    x, norm, bias = inputs.x.float(), inputs.norm, widened(inputs.bias)
    if norm is not None:
        norm = Norm(norm.weight.float(), norm.epsilon)
    if inputs.shape.inner:
        return products.gated_product(
            x, weight.float(), inputs.shape.inner, "silu", bias, norm=norm, backend="torch"
        )
    return products.product(
        x, weight.float(), bias, norm=norm, add=[t.float() for t in inputs.add],
        share=widened(inputs.share), backend="torch",
    )  # fmt: skip


def plans_of(shape: Shape) -> list[Plan]:
    """Launch choices worth a look."""
    if shape.cols > 4096:
        others = [Plan(8, 22, 11), Plan(16, 6, 11, blocks=2)]
    else:
        others = [
            Plan(8, 8, 8, blocks=3), Plan(8, 4, 8, blocks=3), Plan(4, 16, 16, blocks=3),
            Plan(16, 4, 4, blocks=2), Plan(8, 4, 8, blocks=2, height=3), Plan(8, 4, 8, height=6),
        ]  # fmt: skip
    own = choose_plan(8, (shape.rows, shape.cols), shape.norm, shape.inner)
    return list(dict.fromkeys([own, *others]))


def compile_all(work: list[tuple[Shape, Plan]]) -> None:
    """Machine code of all kernels into the cache, side by side."""

    def one(item: tuple[Shape, Plan]) -> None:
        shape, plan = item
        norm = shape.norm
        defines = constants_of(plan, (shape.rows, shape.cols), torch.bfloat16, shape.bias, norm) | {
            "ADD": shape.add
        }
        if shape.inner:
            defines |= {"GATED": 1, "INNER": shape.inner}
        nvrtc.machine_code("products.cu", defines, 10 * major + minor)

    major, minor = torch.cuda.get_device_capability()
    with ThreadPoolExecutor(14) as pool:
        list(pool.map(one, work))


def bench_shape(shape: Shape, tokens: int, with_plans: bool) -> list[dict[str, Any]]:
    """Torch, the kernel as it is chosen, and other plans."""
    weight_bytes = 2 * shape.rows * shape.cols
    inputs = Inputs(shape, tokens, max(2, -(-ROTATED_BYTES // weight_bytes)))
    want = wide(inputs, inputs.weights[0])

    def timed(name: str, most: int, plan: Plan | None) -> dict[str, Any]:
        with used(most):
            off = error(inputs.run(inputs.weights[0], plan=plan), want)
            turns = max(1, 16 // len(inputs.weights))

            def calls() -> None:
                for weight in inputs.weights * turns:
                    inputs.run(weight, plan=plan)

            micros = graph_time(calls, turns * len(inputs.weights))
        return {
            "shape": shape.name, "T": tokens, "form": name, "us": round(micros, 2),
            "TB/s": round(weight_bytes / micros / 1e6, 2), "error": f"{off:.0e}",
        }  # fmt: skip

    records = [timed("torch", 0, None)]
    plans = plans_of(shape)
    for plan in plans if with_plans else plans[:1]:
        name = f"w{plan.warps} s{plan.stages} u{plan.turn} b{plan.blocks}"
        try:
            records.append(timed(name, 8, plan))
        except (RuntimeError, ValueError) as failure:
            records.append({"shape": shape.name, "T": tokens, "form": name, "us": str(failure)})
    return records


class Chain:
    """The dense products of a step."""

    def __init__(self) -> None:
        shapes = SHAPES[:4]
        self.layers = [
            [random(shape.rows, shape.cols) / shape.cols**0.5 for shape in shapes]
            for _ in range(LAYERS)
        ]
        self.head = random(VOCABULARY, HIDDEN)
        self.bias, self.norm = random(3 * HIDDEN), Norm(random(HIDDEN), 1e-6)
        self.bytes = 2 * (sum(w.numel() for layer in self.layers for w in layer))
        self.bytes += 2 * self.head.numel()

    def __call__(self, x: Tensor) -> Tensor:
        for qkv, out, gate_up, down in self.layers:
            heads = products.product(x, qkv, self.bias, norm=self.norm)
            x = products.product(heads[:, :HIDDEN], out, add=(x,))
            gated = products.gated_product(x, gate_up, INNER, "silu", norm=self.norm)
            x = products.product(gated.out, down, add=(x, gated.normed), share=gated.rest[:, :1])
        return products.product(x, self.head)


def bench_chain(chain: Chain, tokens: int) -> dict[str, Any]:
    x = random(tokens, HIDDEN)
    record: dict[str, Any] = {"T": tokens}

    def timed(name: str) -> None:
        micros = graph_time(lambda: chain(x))
        record[f"{name} ms"] = round(micros / 1000, 3)
        record[f"{name} TB/s"] = round(chain.bytes / micros / 1e6, 2)

    with used(0):
        expected = chain(x)
        timed("torch")
    with used(8):
        record["difference"] = f"{error(chain(x), expected):.0e}"
        timed("joined")
        with launches_apart():
            timed("apart")
    return record


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--plans", action="store_true", help="time other launch choices, too")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    compile_all([(shape, plan) for shape in SHAPES for plan in plans_of(shape)])
    records = []
    for tokens in options.tokens:
        for shape in SHAPES:
            records += bench_shape(shape, tokens, options.plans)
    chain = Chain()
    chains = [bench_chain(chain, tokens) for tokens in options.tokens]
    if options.json:
        options.json.write_text(
            json.dumps(about() | {"shapes": records, "chains": chains}, indent=1) + "\n"
        )
    print(torch.cuda.get_device_name())
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault((record["shape"], record["T"]), []).append(record)
    for (name, tokens), found in groups.items():
        parts = [
            f"{r['form']}: {r['us']} us {r.get('TB/s', '')} {r.get('error', '')}" for r in found
        ]
        print(f"{name} T={tokens}  " + " | ".join(parts))
    for record in chains:
        print("chain  " + "  ".join(f"{key} {value}" for key, value in record.items()))


if __name__ == "__main__":
    main()
