"""What decode steps on several GPUs should take, from bytes, bandwidth and measured sums.

    python kernels/bench/scaling.py ranks.json sums.json      # of ranks.py and of sums.py

A step of one GPU is bytes / bandwidth + a time for each layer, both fitted to the cases with one
rank. With R ranks each reads its part, keeps the time for each layer, and makes two sums a layer,
as long as sums.py found them; what that predicts stands beside what was measured. Then the same
for more GPUs, whose sums are assumed (`ASSUMED`).

Not in it: bytes of activations, compute, waits of ranks for each other.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

CONFIGS = Path(__file__).parents[2] / "pipelines" / "recipes" / "configs"
# GPUs, seconds of a sum beside its bytes, bytes that a rank takes in by those of the sum, and how
# many a second: within a machine one kernel over NVLink, which reads the parts of all others;
# between machines NCCL's rings over InfiniBand of 400 Gb/s for each GPU.
ASSUMED = {"8 GPUs": (8, 9e-6, 7.0, 350e9), "2 x 8 GPUs": (16, 40e-6, 2 * 15 / 16, 40e9)}


@dataclass(frozen=True)
class Shape:
    """Bytes of a model that a step reads."""

    layers: int
    bits: int
    config: dict[str, Any]

    def experts(self, batch: int) -> float:
        """Of the experts that a batch chooses evenly, in all layers."""
        config = self.config
        count, chosen = config["num_local_experts"], config["num_experts_per_tok"]
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        busy = count * (1 - (1 - chosen / count) ** batch)
        weights = 3 * hidden * inner * self.bits / 8
        tables = (2 * inner + hidden) * (1 << self.bits) * 2
        return float(self.layers * busy * (weights + tables))

    @property
    def attention(self) -> float:
        """Of the weights of attention."""
        config = self.config
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        share = config["num_key_value_heads"] / heads
        return float(self.layers * 2 * hidden * hidden * (2 + 2 * share))

    def kv(self, batch: int, context: int) -> float:
        """Of keys and values."""
        config = self.config
        size = config["hidden_size"] // config["num_attention_heads"]
        return float(self.layers * batch * context * config["num_key_value_heads"] * size * 2 * 2)

    @property
    def head(self) -> float:
        """Of the output head, whole on every rank."""
        return float(self.config["vocab_size"] * self.config["hidden_size"] * 2)

    def read(self, batch: int, context: int, ranks: int) -> float:
        """Of one rank."""
        shared = self.experts(batch) + self.attention + self.kv(batch, context)
        return shared / ranks + self.head


@dataclass(frozen=True)
class Machine:
    """One GPU, as fitted."""

    bandwidth: float  # bytes a second
    layer: float  # seconds of a layer beside its bytes

    @classmethod
    def fit(cls, rows: list[tuple[float, int, float]]) -> "Machine":
        """From (bytes, layers, seconds) of steps; relative errors count."""
        bytes_read, layers, seconds = (np.array(column) for column in zip(*rows, strict=True))
        weights = np.stack([bytes_read, layers], 1) / seconds[:, None]
        (a, b), *_ = np.linalg.lstsq(weights, np.ones(len(rows)), rcond=None)
        return cls(1 / a, b)

    def step(self, shape: Shape, batch: int, context: int, ranks: int, one_sum: float) -> float:
        """Seconds."""
        own = shape.read(batch, context, ranks) / self.bandwidth
        return own + shape.layers * (self.layer + 2 * one_sum)


def measured_sum(sums: list[dict[str, float]], batch: int) -> float:
    """Seconds of a sum over two ranks from a graph, between the sizes that were measured."""
    tokens = [row["tokens"] for row in sums]
    return float(np.interp(batch, tokens, [row["graph_us"] for row in sums])) * 1e-6


def main() -> None:
    """Fit, compare, predict."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ranks", type=Path)
    parser.add_argument("sums", type=Path)
    options = parser.parse_args()
    found = json.loads(options.ranks.read_text())
    sums = json.loads(options.sums.read_text())["rows"]
    context = int(found["options"]["context"])
    config = json.loads((CONFIGS / f"{found['options']['model']}.json").read_text())
    rows = []
    for result in found["results"]:
        size, width, ranks = result["case"].split(":")
        shape = Shape(int(size), int(width), config)
        decoded = result.get("decode", [])
        rows += [(shape, ranks, row["batch"], row["step_ms"] / 1e3) for row in decoded]
    alone = [(s.read(b, context, 1), s.layers, t) for s, ranks, b, t in rows if ranks == "1"]
    machine = Machine.fit(alone)
    print(f"{machine.bandwidth / 1e12:.2f} TB/s, {machine.layer * 1e6:.0f} us a layer")
    print("| layers:bits:ranks | sequences | GB of a rank | ms measured | ms by the model |")
    print("|---" * 5 + "|")
    for shape, ranks, batch, seconds in rows:
        count = int(ranks.rstrip("em"))
        one_sum = measured_sum(sums, batch) if count > 1 else 0.0
        predicted = machine.step(shape, batch, context, count, one_sum)
        print(
            f"| {shape.layers}:{shape.bits}:{ranks} | {batch} "
            f"| {shape.read(batch, context, count) / 1e9:.1f} | {seconds * 1e3:.2f} "
            f"| {predicted * 1e3:.2f} |"
        )
    heads = " | ".join(ASSUMED)
    print(f"\n| layers:bits | sequences | ms on {heads} | tokens/s |\n" + "|---" * 5 + "|")
    for layers, bits in dict.fromkeys((row[0].layers, row[0].bits) for row in rows):
        model = Shape(layers, bits, config)
        for batch in sorted({row[2] for row in rows}):
            times = []
            for count, latency, taken, link in ASSUMED.values():
                one_sum = latency + batch * config["hidden_size"] * 2 * taken / link
                times.append(machine.step(model, batch, context, count, one_sum))
            print(
                f"| {layers}:{bits} | {batch} | "
                + " | ".join(f"{time * 1e3:.2f}" for time in times)
                + " | "
                + ", ".join(f"{batch / time:.0f}" for time in times)
                + " |"
            )


if __name__ == "__main__":
    main()
