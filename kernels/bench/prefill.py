"""A prompt chunk: the parts beside experts and attention as they are, and through torch.compile.

    python kernels/bench/prefill.py                  # Qwen1.5-MoE-A2.7B, static:3, 2,048 tokens

The dense parts of all layers (norms, projections, the shared expert, residual sums) run on the
model's own weights in both forms; results are compared, then timed. "chunk" is a whole prompt of
so many tokens in an engine, as its caller sees it, so that the difference is seen in proportion.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from records import about
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from pw.config import EngineConfig, PrecisionPolicy
from pw.engine import Engine
from pw.engine.request import SamplingParams
from pw.models.stand_in import write_folder
from pw_kernels import products

CONFIGS = Path(__file__).parents[2] / "pipelines" / "recipes" / "configs"


def as_it_is(layer: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Joint projections of x, and the layer's end; y stands for what attention and experts give."""
    qkv = products.product(x, *layer._attention._qkv, norm=layer._attention._norm.joined)
    middle = layer._out(x, y)
    shared = layer._mlp._gated(middle)
    share = shared.rest[:, :1]
    return qkv, products.product(shared.out, layer._mlp._down, add=(middle, y), share=share)


def plain(
    x: Tensor, y: Tensor, epsilon: float, norms: tuple[Tensor, Tensor], qkv: tuple[Tensor, Any],
    out: Tensor, gated: tuple[Tensor, Any], inner: int, down: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same in plain torch, for the compiler."""
    size = x.shape[-1:]
    projected = linear(rms_norm(x, size, norms[0], epsilon), *qkv)
    middle = x + linear(y, out)
    parts = linear(rms_norm(middle, size, norms[1], epsilon), *gated)
    hidden = silu(parts[:, :inner]) * parts[:, inner : 2 * inner]
    share = parts[:, 2 * inner : 2 * inner + 1].sigmoid()
    return projected, middle + y + share * linear(hidden, down)


def arguments(layer: Any) -> tuple[Any, ...]:
    mlp, gated = layer._mlp, layer._mlp._gated
    qkv, norm = layer._attention._qkv, layer._attention._norm
    norms = (norm._weight, gated._norm._weight)
    return (norm._epsilon, norms, qkv, layer._out._weight, gated._in, gated._inner, mlp._down)


def milliseconds(run: Any, rounds: int = 10) -> float:
    """Of one run on the device."""
    run()
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def chunk_milliseconds(engine: Engine, tokens: int, rounds: int = 5) -> float:
    """A prompt of so many tokens, to its first token."""
    random, times = np.random.default_rng(0), []
    for number in range(rounds + 1):
        prompt = random.integers(100, 5000, size=tokens).tolist()
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        begin = time.perf_counter()
        engine.add_request(f"chunk-{number}", prompt, params)
        while engine.has_work():
            engine.step()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times[1:])


@torch.inference_mode()
def dense_milliseconds(engine: Engine, compiled: Any, tokens: int) -> dict[str, float]:
    """Of the dense parts of all layers, in three forms, the last compared with the first."""
    skeleton = engine._parts.skeleton
    flat: Any = skeleton.flat
    shape = (tokens, skeleton.hidden_size)
    x, y = (torch.randn(shape, device="cuda", dtype=skeleton.dtype) for _ in range(2))
    layers = flat._layers
    given = [arguments(layer) for layer in layers]
    mine, its = as_it_is(layers[0], x, y), compiled(x, y, *given[0])
    for a, b in zip(mine, its, strict=True):
        columns = min(a.shape[1], b.shape[1])
        error = (a[:, :columns] - b[:, :columns]).float().norm() / a.float().norm()
        assert error < 2e-2, f"compiled parts differ: {error:.1e}"
    return {
        "as_it_is_ms": milliseconds(lambda: [as_it_is(layer, x, y) for layer in layers]),
        "plain_ms": milliseconds(lambda: [plain(x, y, *each) for each in given]),
        "compiled_ms": milliseconds(lambda: [compiled(x, y, *each) for each in given]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen1.5-moe-a2.7b", help="of pipelines/recipes/configs")
    parser.add_argument("--policies", nargs="+", default=["static:3"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[512, 2048])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        write_folder(CONFIGS / f"{options.model}.json", folder, {})
        for policy in options.policies:
            engine = Engine.from_artifact(
                folder,
                EngineConfig(
                    memory_budget=60 << 30, policy=PrecisionPolicy.parse(policy), device="cuda",
                    load_format="dummy", max_num_seqs=4, enable_prefix_caching=False,
                    max_num_batched_tokens=max(options.tokens),
                ),
            )  # fmt: skip
            compiled = torch.compile(plain, dynamic=False)
            for tokens in options.tokens:
                row = {"policy": policy, "tokens": tokens}
                row["chunk_ms"] = chunk_milliseconds(engine, tokens)
                row |= dense_milliseconds(engine, compiled, tokens)
                rows.append(row)
                print(row, flush=True)
            engine.close()
            del engine
    if options.json:
        options.json.write_text(json.dumps(about() | {"rows": rows}))
    print("| policy | tokens | chunk, ms | dense parts, ms | plain torch | compiled |")
    print("|---" * 6 + "|")
    for row in rows:
        print(
            f"| {row['policy']} | {row['tokens']} | {row['chunk_ms']:.1f} "
            f"| {row['as_it_is_ms']:.2f} | {row['plain_ms']:.2f} | {row['compiled_ms']:.2f} |"
        )


if __name__ == "__main__":
    main()
