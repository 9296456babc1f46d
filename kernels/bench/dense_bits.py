"""Dense weights through the kernels of the experts: is a static width faster than cuBLAS?

    python kernels/bench/dense_bits.py --json FILE

The maps of Qwen1.5-MoE-A2.7B that are never quantized, at 6 and 8 bits, beside bf16 through
`torch.mm`: microseconds of the kernel alone, checked against the reference. Each call has weights
of its own, so that nothing is found in the cache. A map stands for `gate_up` of one expert: the
activation behind it is counted, its bytes are nearly nothing.
"""

import argparse
import itertools
import json
import statistics
from dataclasses import replace
from pathlib import Path

import moe
import torch
from records import about
from torch import Tensor

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


class Map:
    """One map in several copies, as `gate_up` of experts, and its launches for T tokens."""

    def __init__(self, rows: int, cols: int) -> None:
        copies = max(2, -(-_ROTATED // (2 * rows * cols)))
        self.model = moe.Model(copies, 1, cols, rows // 2)
        self.layer = moe.Layer(self.model)
        self.few = copies * rows * cols < 1 << 29  # enough memory to decode them all

    def batches(self, tokens: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """The same tokens to one copy after the other."""
        x = torch.randn(tokens, self.model.hidden, dtype=torch.bfloat16, device="cuda")
        ids = torch.zeros(tokens, 1, dtype=torch.int64, device="cuda")
        return [(x, ids + e, torch.ones_like(ids).float()) for e in range(self.model.experts)]

    def plan(self, tokens: int) -> cuda_moe.Plan:
        """As for one expert, or one of several if there is one token; launches kept apart."""
        experts = 2 if tokens == 1 else 1
        return replace(cuda_moe.choose_plan(tokens, experts, nvrtc.shared_bytes(0)), overlap=False)

    def take(self, bits: int) -> None:
        """All copies have this width and can have no other."""
        self.layer.set_bits(moe.alike(self.model, lambda _: bits))
        for blocks in self.layer.blocks.values():
            blocks.pages = replace(blocks.pages, widths=(bits, bits))

    def measure(self, tokens: int, widths: list[int]) -> dict[str, float]:
        """Microseconds at each width, and in bf16."""
        batches, plan = self.batches(tokens), self.plan(tokens)
        weights = self.layer.dense["gate_up"]
        calls = [
            lambda b=b, w=w: torch.mm(b[0], w.t()) for b, w in zip(batches, weights, strict=True)
        ]
        # cuBLAS may split a product over two kernels: all of a call count.
        found = {"bf16": statistics.median(sum(row) for row in moe.kernel_times(calls))}
        for bits in widths:
            self.take(bits)
            error = self.layer.error(batches[0], plan) if self.few else 0.0
            if not error < 1e-2:
                print(f"WRONG: {weights.shape[1:]}, {tokens} tokens, {bits} bits: {error:.1e}")
                continue
            found[f"{bits} bits"] = moe.module_times(self.layer, batches, plan)["gate_up"]
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
    maps = {name: Map(*MAPS[name]) for name in options.maps}
    with nvrtc.Rehearsal():  # compiles side by side
        for each in maps.values():
            for tokens, bits in itertools.product(options.tokens, options.bits):
                each.take(bits)
                each.layer.run(each.batches(tokens)[0], each.plan(tokens))
    records = []
    heads = ["map", "T", "bf16", *(f"{bits} bits" for bits in options.bits)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, each in maps.items():
        for tokens in options.tokens:
            found = each.measure(tokens, options.bits)
            records.append({"map": name, "tokens": tokens, "us": found})
            cells = [f"{found['bf16']:.1f}"]
            cells += [
                f"{found[width]:.1f} ({found['bf16'] / found[width]:.2f})" if width in found else ""
                for width in heads[3:]
            ]
            lines.append(f"| {name} | {tokens} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
            if options.json:
                options.json.write_text(json.dumps(about() | {"records": records}))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
