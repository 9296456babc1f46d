"""What decode steps on several GPUs should take, from bytes, bandwidths and measured sums.

    python kernels/bench/scaling.py sums.json ranks.json [more.json]      # of sums.py, of ranks.py

A step is the bytes of its experts over one bandwidth, all other bytes over another, a time for each
layer, and with several ranks two sums a layer, as long as sums.py found them. A rank reads its part
and all of the head; by experts, as many experts as the busiest rank was seen to read. The three
numbers are fitted to all cases by slices and on one GPU at once, so that relative errors are least;
what comes out stands beside what was measured, also where a case is left out of the fit. Then the
same for more GPUs, whose sums are assumed (`ASSUMED`).

Not in it: bytes of activations, compute, waits of ranks for each other.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

CONFIGS = Path(__file__).parents[2] / "pipelines" / "recipes" / "configs"
# GPUs, and the ways that their sums have: seconds beside the bytes, bytes that a rank takes in by
# those of the sum, how many a second, and bytes of a sum at most. Within a machine over NVLink the
# ranks' own kernel, whose lines are half data and come from all others, beyond its limit NCCL's
# rings; between machines NCCL's rings over InfiniBand of 400 Gb/s for each GPU.
ASSUMED = {
    "8 GPUs": (8, [(4e-6, 14.0, 350e9, (1 << 20) / 7), (25e-6, 1.75, 350e9, np.inf)]),
    "2 x 8 GPUs": (16, [(40e-6, 2 * 15 / 16, 40e9, np.inf)]),
}


@dataclass(frozen=True)
class Shape:
    """Bytes of a model that a step reads."""

    layers: int
    bits: int
    config: dict[str, Any]

    def even(self, batch: int) -> float:
        """Experts of a layer that a batch chooses, if it chooses evenly."""
        count, chosen = self.config["num_local_experts"], self.config["num_experts_per_tok"]
        return float(count * (1 - (1 - chosen / count) ** batch))

    def experts(self, busy: float) -> float:
        """Of so many experts in all layers."""
        hidden, inner = self.config["hidden_size"], self.config["intermediate_size"]
        weights = 3 * hidden * inner * self.bits / 8
        tables = (2 * inner + hidden) * (1 << self.bits) * 2
        return float(self.layers * busy * (weights + tables))

    @property
    def attention(self) -> float:
        """Of the weights of attention."""
        hidden, heads = self.config["hidden_size"], self.config["num_attention_heads"]
        share = self.config["num_key_value_heads"] / heads
        return float(self.layers * 2 * hidden * hidden * (2 + 2 * share))

    def kv(self, batch: int, context: int) -> float:
        """Of keys and values."""
        size = self.config["hidden_size"] // self.config["num_attention_heads"]
        width = self.config["num_key_value_heads"] * size * 2 * 2
        return float(self.layers * batch * context * width)

    @property
    def head(self) -> float:
        """Of the output head, whole on every rank."""
        return float(self.config["vocab_size"] * self.config["hidden_size"] * 2)


@dataclass(frozen=True)
class Step:
    """A decode step of a rank, and how long it took.

    Attributes:
        name: Of the case.
        batch: Sequences.
        experts: Bytes.
        rest: Bytes.
        layers: How many.
        sums: Seconds of all sums over the ranks.
        seconds: Measured; 0 if it was not.
    """

    name: str
    batch: int
    experts: float
    rest: float
    layers: int
    sums: float
    seconds: float = 0.0

    @classmethod
    def of(
        cls, name: str, shape: Shape, batch: int, context: int, ranks: int, one_sum: float,
        busy: float | None = None, seconds: float = 0.0,
    ) -> "Step":  # fmt: skip
        """From a shape; `busy`: experts of a layer that a rank reads, in whole ones."""
        read = shape.experts(shape.even(batch) / ranks if busy is None else busy)
        rest = (shape.attention + shape.kv(batch, context)) / ranks + shape.head
        sums = 2 * shape.layers * one_sum if ranks > 1 else 0.0
        return cls(name, batch, read, rest, shape.layers, sums, seconds)


@dataclass(frozen=True)
class Machine:
    """One GPU, as fitted."""

    experts: float  # bytes a second
    rest: float  # bytes a second
    layer: float  # seconds of a layer beside its bytes

    @classmethod
    def fit(cls, steps: list[Step]) -> "Machine":
        """From measured steps; relative errors count."""
        rows = np.array([[step.experts, step.rest, step.layers] for step in steps])
        seconds = np.array([step.seconds for step in steps])
        wanted = 1 - np.array([step.sums for step in steps]) / seconds
        (a, b, c), *_ = np.linalg.lstsq(rows / seconds[:, None], wanted, rcond=None)
        return cls(1 / a, 1 / b, c)

    def seconds(self, step: Step) -> float:
        """Of a step."""
        bytes_read = step.experts / self.experts + step.rest / self.rest
        return bytes_read + step.layers * self.layer + step.sums


def measured_sum(sums: list[dict[str, Any]], batch: int, way: str) -> float:
    """Seconds of a sum over two ranks from a graph, between the sizes that were measured."""
    rows = [row for row in sums if row["way"] == way]
    tokens = [row["tokens"] for row in rows]
    return float(np.interp(batch, tokens, [row["graph_us"] for row in rows])) * 1e-6


def read_steps(
    found: dict[str, Any], config: dict[str, Any], sums: list[dict[str, Any]]
) -> list[Step]:
    """The decode steps of a result of ranks.py."""
    steps, context = [], int(found["options"]["context"])
    for result in found["results"]:
        size, width, ranks = result["case"].split(":")
        shape, count = Shape(int(size), int(width), config), int(ranks.rstrip("emn"))
        way = "nccl" if "n" in ranks else "kernel"
        for row in result.get("decode", []):
            batch, routed = row["batch"], row.get("routing")
            one_sum, busy = measured_sum(sums, batch, way), None
            if routed is not None:
                whole = "e" in ranks
                busy = routed["busiest_rank_experts"] / (1 if whole else count)
            steps.append(
                Step.of(
                    result["case"], shape, batch, context, count, one_sum, busy,
                    row["step_ms"] / 1e3,
                )
            )  # fmt: skip
    return steps


def main() -> None:
    """Fit, compare, predict."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sums", type=Path)
    parser.add_argument("ranks", type=Path, nargs="+")
    options = parser.parse_args()
    sums = json.loads(options.sums.read_text())["rows"]
    results = [json.loads(path.read_text()) for path in options.ranks]
    name = results[0]["options"]["model"]
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    steps = [step for found in results for step in read_steps(found, config, sums)]
    fitted = [step for step in steps if "e" not in step.name]
    machine = Machine.fit(fitted)
    compare(machine, steps, fitted)
    predict(machine, steps, config, int(results[0]["options"]["context"]))


def compare(machine: Machine, steps: list[Step], fitted: list[Step]) -> None:
    """The model beside what was measured."""
    print(
        f"experts {machine.experts / 1e12:.2f} TB/s, rest {machine.rest / 1e12:.2f} TB/s, "
        f"{machine.layer * 1e6:.0f} us a layer"
    )
    print(
        "| layers:bits:ranks | sequences | GB of a rank | ms measured | by the model | left out |"
    )
    print("|---" * 6 + "|")
    for step in steps:
        rest = [other for other in fitted if other.name != step.name]
        left_out = beside(Machine.fit(rest), step) if step in fitted else ""
        print(
            f"| {step.name} | {step.batch} | {(step.experts + step.rest) / 1e9:.1f} "
            f"| {step.seconds * 1e3:.2f} | {beside(machine, step)} | {left_out} |"
        )


def beside(machine: Machine, step: Step) -> str:
    """What a model says of a step that was measured, and by how much it is wrong."""
    seconds = machine.seconds(step)
    return f"{seconds * 1e3:.2f} ({seconds / step.seconds - 1:+.1%})"


def predict(machine: Machine, steps: list[Step], config: dict[str, Any], context: int) -> None:
    """More GPUs."""
    heads = " | ".join(ASSUMED)
    print(f"\n| layers:bits | sequences | ms on {heads} | tokens/s |\n" + "|---" * 5 + "|")
    sizes = dict.fromkeys(tuple(map(int, step.name.split(":")[:2])) for step in steps)
    for layers, bits in sizes:
        model = Shape(layers, bits, config)
        for batch in sorted({step.batch for step in steps}):
            times = []
            for count, ways in ASSUMED.values():
                size = batch * config["hidden_size"] * 2
                latency, taken, link, _ = next(way for way in ways if size <= way[3])
                one_sum = latency + size * taken / link
                step = Step.of("", model, batch, context, count, one_sum)
                times.append(machine.seconds(step))
            print(
                f"| {layers}:{bits} | {batch} | "
                + " | ".join(f"{time * 1e3:.2f}" for time in times)
                + " | "
                + ", ".join(f"{batch / time:.0f}" for time in times)
                + " |"
            )


if __name__ == "__main__":
    main()
