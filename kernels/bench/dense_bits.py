"""Dense weights through the kernels of the experts: is a static width faster than cuBLAS?

    python kernels/bench/dense_bits.py

The maps of Qwen1.5-MoE-A2.7B that are never quantized, at 6 and 8 bits, beside bf16 through
`torch.mm`: microseconds of the kernel alone, checked against the reference. Each call has weights
of its own, so that nothing is found in the cache. A map stands for `gate_up` of one expert: the
activation behind it is counted, its bytes are nearly nothing.
"""

import argparse
import json
import statistics
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import moe
import torch

from pw_kernels import cuda_moe, nvrtc

# Outputs and inputs; the head a little smaller: whole tiles of the other map of its expert.
MAPS = {
    "qkv": (6144, 2048),
    "o": (2048, 2048),
    "shared gate_up": (11264, 2048),
    "shared down": (2048, 5632),
    "head": (151552, 2048),
}
_ROTATED = 300 << 20  # bytes of bf16 weights in turn, at least


def measure(rows: int, cols: int, tokens: int, widths: list[int]) -> dict[str, float]:
    """Microseconds of a map at each width, and in bf16."""
    copies = max(2, -(-_ROTATED // (2 * rows * cols)))
    model = moe.Model(copies, 1, cols, rows // 2)
    layer = moe.Layer(model)
    weights = layer.dense["gate_up"]
    x = torch.randn(tokens, cols, dtype=torch.bfloat16, device="cuda")
    calls = [lambda e=e: torch.mm(x, weights[e].t()) for e in range(copies)]
    # cuBLAS may split a product over two kernels: all of a call count.
    found = {"bf16": statistics.median(sum(row) for row in moe.kernel_times(calls))}
    plan = replace(cuda_moe.choose_plan(tokens, 1, nvrtc.shared_bytes(0)), overlap=False)
    batches = [
        (
            x,
            torch.full((tokens, 1), e, device="cuda"),
            torch.ones(tokens, 1, device="cuda"),
        )
        for e in range(copies)
    ]
    for bits in widths:
        layer.set_bits(moe.alike(model, lambda _, bits=bits: bits))
        error = layer.error(batches[0], plan) if copies * rows * cols < 1 << 29 else 0.0
        if not error < 1e-2:
            print(f"WRONG: {rows} x {cols}, {tokens} tokens, {bits} bits: error {error:.1e}")
            continue
        found[f"{bits} bits"] = moe.module_times(layer, batches, plan)["gate_up"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--bits", type=int, nargs="+", default=[6, 8])
    parser.add_argument("--maps", nargs="+", choices=list(MAPS), default=list(MAPS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    records = []
    heads = ["map", "T", "bf16", *(f"{bits} bits" for bits in options.bits)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name in options.maps:
        for tokens in options.tokens:
            try:
                found = measure(*MAPS[name], tokens, options.bits)
            except Exception as error:
                print(f"{name}, {tokens} tokens: {type(error).__name__}: {error}")
                continue
            records.append({"map": name, "tokens": tokens, "us": found})
            cells = [f"{found['bf16']:.1f}"]
            cells += [
                f"{found[width]:.1f} ({found['bf16'] / found[width]:.2f})" if width in found else ""
                for width in heads[3:]
            ]
            lines.append(f"| {name} | {tokens} | {' | '.join(cells)} |")
            torch.cuda.empty_cache()
    if options.json:
        about = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        options.json.write_text(json.dumps(about | {"records": records}))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
