"""Low-bit peers on a GPU: torch's int4 product and GemLite beside the routed experts, in one run.

    python kernels/bench/peers.py                     # Qwen1.5-MoE-A2.7B, T = 1, 4, 16, 32, 64, 128
    python kernels/bench/peers.py --tokens 32 --peers "GemLite 4 bit" --json results.json
    python kernels/bench/peers.py --prepare "GemLite 4 bit:2x168960x2048"     # compiles and tunes

The experts are whole layers as models run them: routing, both modules, activation, last sum. The
peers know no experts, so each multiplies one dense matrix that has as many weights as the experts
that T tokens read in this run, by as many rows as such an expert has tokens on average (`--rows
tokens`: by T rows). That is the most favourable case for a peer: one launch, one width, no routing.

Times are medians of CUDA graphs that rotate through more bytes than the cache holds. Each result is
compared with the product of the dequantized weights in fp32. "of bf16" is times faster than bf16
weights in the same form: the layer of `cuda_dense` for experts, cuBLAS for dense matrices. GemLite
is optional (`pip install gemlite`); a peer that is missing or fails is named and left out.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import triton
from moe import MODELS, Layer, Model, alike, dense_layer, graph_time
from torch import Tensor

GROUP = 128  # columns that share a scale, where a peer has groups
CACHE_BYTES = 256 << 20  # to rotate through
TOLERANCE = 1e-2  # relative error of a bf16 product
PEER_TOLERANCE = 3e-2  # GemLite adds the parts of a split sum to bf16 in memory


@dataclass
class Matrix:
    """A dense matrix as a peer keeps it."""

    run: Callable[[Tensor], Tensor]  # [M, K] bf16 -> [M, N] bf16
    weights: Callable[[], Tensor]  # [N, K] fp32: what its codes mean
    bytes_read: int


def random_codes(rows: int, cols: int, bits: int) -> tuple[Tensor, Tensor, Callable[[], Tensor]]:
    """Codes [N, K] uint8, scales [N, K / GROUP] bf16, and (codes - half) * scales in fp32."""
    codes = torch.randint(0, 1 << bits, (rows, cols), dtype=torch.uint8, device="cuda")
    scales = torch.rand(rows, cols // GROUP, device="cuda") + 0.5
    scales = (scales * cols**-0.5 / (1 << bits - 1)).bfloat16()

    def weights() -> Tensor:
        centred = codes.float().view(rows, -1, GROUP) - (1 << bits - 1)
        return (centred * scales.float()[..., None]).view(rows, cols)

    return codes, scales, weights


def cublas(rows: int, cols: int) -> Matrix:
    matrix = torch.randn(rows, cols, dtype=torch.bfloat16, device="cuda") * cols**-0.5
    return Matrix(lambda x: x @ matrix.t(), matrix.float, matrix.nbytes)


def torch_int4(rows: int, cols: int) -> Matrix:
    """`_weight_int4pack_mm`, the kernel of torchao's int4 weights; 8 tiles of K in a step."""
    codes, scales, weights = random_codes(rows, cols, 4)
    pairs = codes[:, ::2] << 4 | codes[:, 1::2]
    packed = torch.ops.aten._convert_weight_to_int4pack(pairs, 8)
    offsets = torch.stack([scales, torch.zeros_like(scales)], -1).transpose(0, 1).contiguous()

    def run(x: Tensor) -> Tensor:
        return torch.ops.aten._weight_int4pack_mm(x, packed, GROUP, offsets)  # type: ignore[no-any-return]

    return Matrix(run, weights, packed.nbytes + offsets.nbytes)


def gemlite_int4(rows: int, cols: int) -> Matrix:
    from gemlite import DType, GemLiteLinear  # type: ignore[import-not-found]

    codes, scales, weights = random_codes(rows, cols, 4)
    linear = GemLiteLinear(4, GROUP, cols, rows, input_dtype=DType.BF16, output_dtype=DType.BF16)
    linear.pack(codes, scales, torch.full_like(scales, 8))
    return Matrix(linear, weights, sum(t.nbytes for t in (linear.W_q, linear.scales, linear.zeros)))


def gemlite_int8(rows: int, cols: int) -> Matrix:
    """One scale a row, as GemLite's own helper makes it."""
    from gemlite.helper import A16W8_INT8  # type: ignore[import-not-found]

    codes = torch.randint(-127, 128, (rows, cols), dtype=torch.int8, device="cuda")
    scales = ((torch.rand(rows, 1, device="cuda") + 0.5) * cols**-0.5 / 127).bfloat16()
    linear = A16W8_INT8(dtype=torch.bfloat16).from_weights(codes, scales=scales)
    read = linear.W_q.nbytes + linear.scales.nbytes
    return Matrix(linear, lambda: codes.float() * scales.float(), read)


PEERS: dict[str, Callable[[int, int], Matrix]] = {
    "cuBLAS bf16": cublas,
    "torch int4": torch_int4,
    "GemLite 4 bit": gemlite_int4,
    "GemLite 8 bit": gemlite_int8,
}


def tune_quickly(once: bool = False) -> None:
    """GemLite times every tile of its lists at a new shape: 15 ms each instead of 125, or once."""
    try:
        from gemlite.core import GEMLITE_TRITON_KERNELS  # type: ignore[import-not-found]
    except Exception:  # not installed, or no GPU: said where the peer is built
        return

    def quick(call: Callable[[], Any], quantiles: list[float]) -> Any:
        if once:
            call()
            return [0.0] * len(quantiles)
        return triton.testing.do_bench(call, warmup=3, rep=12, quantiles=quantiles)

    for family in GEMLITE_TRITON_KERNELS:
        for kernel in family.kernel:
            kernel._do_bench = quick
            kernel.__dict__.pop("do_bench", None)


def dense_size(model: Model, active: float) -> tuple[int, int]:
    """Rows and columns of one matrix with as many weights as so many experts; whole tiles."""
    return round(active * 3 * model.inner / 512) * 512, model.hidden


def dense_record(build: Callable[[int, int], Matrix], m: int, rows: int, cols: int) -> Any:
    """Microseconds, bytes and error of x [m, cols] times matrices [rows, cols] that take turns."""
    matrix = build(rows, cols)
    x = torch.randn(m, cols, dtype=torch.bfloat16, device="cuda")
    want = x.float() @ matrix.weights().t()
    error = ((matrix.run(x).float() - want).norm() / want.norm()).item()
    del want
    if not error < PEER_TOLERANCE:
        raise ArithmeticError(f"relative error {error:.1e}")
    others = range(1, max(2, -(-CACHE_BYTES // matrix.bytes_read)))
    turns = [matrix, *(build(rows, cols) for _ in others)]
    micros = graph_time(lambda each: each.run(x), turns)
    return {"us": micros, "bytes": matrix.bytes_read, "weights": rows * cols, "error": error}


def expert_records(
    layer: Layer, batches: list[Any], bits: list[int]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The bf16 layer and ours at each width, over the same batches."""
    model = layer.model
    touched = [set(ids.flatten().tolist()) for _, ids, _ in batches]
    weights = 3 * model.inner * model.hidden * statistics.mean(map(len, touched))
    micros = graph_time(lambda batch: dense_layer(layer, batch), batches)
    yield "experts bf16", {"us": micros, "bytes": int(2 * weights), "weights": int(weights)}
    for width in bits:
        layer.set_bits(alike(model, lambda _, width=width: width))
        if not (error := layer.error(batches[0], None)) < TOLERANCE:
            print(f"experts {width} bit: wrong, relative error {error:.1e}")
            continue
        read = statistics.mean(
            sum(b.bytes_read([width] * model.experts, t) for b in layer.blocks.values())
            for t in touched
        )
        record = {"us": graph_time(layer.run, batches), "bytes": int(read), "error": error}
        yield f"experts {width} bit", record | {"weights": int(weights)}


def bench(options: argparse.Namespace) -> list[dict[str, Any]]:
    model = MODELS[options.model]
    layer = Layer(model)
    stamp = {
        "model": options.model,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.now(UTC).date().isoformat(),
    }
    records: list[dict[str, Any]] = []
    missing: set[str] = set()
    for tokens in options.tokens:
        torch.manual_seed(tokens)
        batches = layer.batches(tokens)
        active = statistics.mean(len(ids.unique()) for _, ids, _ in batches)
        slots = tokens * model.top_k / active
        m = tokens if options.rows == "tokens" else max(1, round(slots))
        found = dict(expert_records(layer, batches, options.bits))
        for name in options.peers:
            try:
                size = dense_size(model, active)
                found[name] = dense_record(PEERS[name], m, *size) | {"rows": m}
            except Exception as error:  # optional: whatever it is, the others are still measured
                if name not in missing:
                    why = str(error).strip().splitlines()[:1] or [""]
                    print(f"{name} is left out: {type(error).__name__}: {why[0][:200]}", flush=True)
                missing.add(name)
            torch.cuda.empty_cache()
        for name, record in found.items():
            base = found.get("experts bf16" if name.startswith("experts") else "cuBLAS bf16")
            ratio = {} if base is None else {"ratio": base["us"] / record["us"]}
            records.append(stamp | {"tokens": tokens, "name": name} | record | ratio)
        print(f"{tokens} tokens: {active:.1f} active experts, {slots:.2f} slots each", flush=True)
    return records


def prepare(jobs: list[str]) -> None:
    """Run each `peer:rows x matrix rows x columns` once, so that its kernels are compiled."""
    for job in jobs:
        name, _, size = job.partition(":")
        m, rows, cols = map(int, size.split("x"))
        x = torch.randn(m, cols, dtype=torch.bfloat16, device="cuda")
        PEERS[name](rows, cols).run(x)
        torch.cuda.empty_cache()
    torch.cuda.synchronize()


def table(records: list[dict[str, Any]]) -> str:
    heads = f"{'T':<5}{'':<16}{'rows':>5}{'us':>9}{'GB/s':>8}{'Gweights/s':>12}{'of bf16':>9}"
    lines = [heads]
    for r in records:
        rate = [f"{r[key] / r['us'] / 1e3:.0f}" for key in ("bytes", "weights")]
        ratio = f"{r['ratio']:.2f}" if "ratio" in r else ""
        lines.append(
            f"{r['tokens']:<5}{r['name']:<16}{r.get('rows', ''):>5}{r['us']:>9.1f}"
            f"{rate[0]:>8}{rate[1]:>12}{ratio:>9}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=sorted(MODELS), default="qwen1.5-moe")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 32, 64, 128])
    parser.add_argument("--bits", type=int, nargs="*", default=[4, 8], help="of the experts")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--rows", choices=("expert", "tokens"), default="expert")
    parser.add_argument("--prepare", nargs="+", help="peers and sizes: nothing is timed")
    parser.add_argument("--json", type=Path, help="also write the records here")
    options = parser.parse_args()
    tune_quickly(once=bool(options.prepare))
    if options.prepare:
        prepare(options.prepare)
        return
    records = bench(options)
    if options.json:
        options.json.write_text(json.dumps(records, indent=1))
    print(table(records))


if __name__ == "__main__":
    main()
