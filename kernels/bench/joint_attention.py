"""Rotation, store and attention of a decode step: in one launch and in two, checked and timed.

    python kernels/bench/joint_attention.py [--json results.json]

Times are medians of graph replays, whose calls rotate through more bytes than the cache holds, as
the layers of a model do; "floor" is what keys and values take at the bandwidth of a copy. Errors
are relative, against torch in fp32. One table comes last.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from attention import CACHE_BYTES, copy_bandwidth, graph_time
from records import about
from torch import Tensor

from pw_kernels import cuda_joint_attention, dispatch, joint_attention, reference, step

MOST_TURNS = 40
LEAST_CALLS = 20
FORMS = ("two launches", "one")


@dataclass(frozen=True)
class Model:
    """Attention of a model.

    Attributes:
        normed: 0, 1: heads of queries and keys, 2: of values, too.
        shared: Values are the keys.
    """

    name: str
    heads: int
    kv_heads: int
    size: int
    page_tokens: int
    window: int | None = None
    normed: int = 0
    shared: bool = False


MODELS = (
    Model("Qwen1.5-MoE", 16, 16, 128, 4),
    Model("Mixtral", 32, 8, 128, 16),
    Model("Qwen3-30B", 32, 4, 128, 32, normed=1),
    Model("Gemma 4, window", 16, 8, 256, 8, window=1024, normed=2),
    Model("Gemma 4, no window", 16, 2, 512, 8, normed=2, shared=True),
)


class Inputs:
    """What the layers of a model give in turn: the same rows, other pages."""

    def __init__(self, model: Model, sequences: int, context: int) -> None:
        seen = min(context, model.window or context)
        self.bytes_read = sequences * seen * model.kv_heads * model.size * 4
        turns = min(MOST_TURNS, -(-CACHE_BYTES // self.bytes_read))
        blocks = -(-context // model.page_tokens)
        shape = (turns * sequences * blocks, 2, model.page_tokens, model.kv_heads, model.size)
        self.arena = torch.randn(shape, device="cuda").bfloat16()
        order = torch.randperm(len(self.arena), device="cuda").int()
        self.tables = order.view(turns, sequences, blocks)
        place, within = divmod(context - 1, model.page_tokens)
        self.slots = self.tables[:, :, place].long() * model.page_tokens + within
        starts = torch.arange(sequences + 1, device="cuda").int()
        self.lengths = (starts, torch.full((sequences,), context, device="cuda").int())
        outputs = model.heads + (1 if model.shared else 2) * model.kv_heads
        rows = torch.randn(sequences, outputs * model.size, device="cuda").bfloat16()
        angles = torch.randn(2, sequences, model.size, device="cuda").bfloat16()
        self.rows = (rows, *angles)
        count = (0, model.heads + model.kv_heads, model.heads + 2 * model.kv_heads)[model.normed]
        norm = torch.rand(count, model.size, device="cuda").bfloat16() if count else None
        self.rotation: dict[str, Any] = {
            "head_size": model.size, "norm": norm, "epsilon": 1e-6, "shared_values": model.shared,
        }  # fmt: skip
        self.window = model.window
        self.counters = dispatch.attention_counters(self.arena.device)

    def calls(self) -> list[Callable[[], Tensor]]:
        """Of all turns, at least so many that a graph is worth its launch."""

        def call(turn: int) -> Tensor:
            return joint_attention.attend(
                *self.rows, self.arena[:, 0], self.arena[:, 1], self.slots[turn],
                self.tables[turn], *self.lengths, scale=0.1, window=self.window,
                counters=self.counters, **self.rotation,
            )  # fmt: skip

        turns = range(len(self.tables))
        return [lambda turn=turn: call(turn) for turn in turns] * -(-LEAST_CALLS // len(turns))

    def want(self) -> Tensor:
        """What torch makes of the first turn."""
        arena = self.arena.clone()
        pages = (arena[:, 0], arena[:, 1])
        q = step.rotate_store(*self.rows, *pages, self.slots[0], backend="torch", **self.rotation)
        return reference.paged_attention(
            q, *pages, self.tables[0], *self.lengths, scale=0.1, window=self.window
        ).float()

    def takes(self) -> bool:
        """Whether one launch is taken."""
        return bool(
            cuda_joint_attention.fits(
                *self.rows, self.arena[:, 0], self.arena[:, 1], self.tables[0],
                self.rotation["norm"], self.rotation["shared_values"],
            )
        )  # fmt: skip


def timed(calls: Sequence[Callable[[], Tensor]], want: Tensor) -> tuple[float, float]:
    """Microseconds of a call, and the error of its result."""
    error = ((calls[0]().float() - want).norm() / want.norm()).item()
    return round(graph_time(calls), 1), float(f"{error:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="also write the records here")
    options = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    records: list[dict[str, Any]] = []
    for context in (1024, 8192):
        for model in MODELS:
            for sequences in (1, 4, 8, 32):
                inputs = Inputs(model, sequences, context)
                if not inputs.takes():
                    continue
                calls, want = inputs.calls(), inputs.want()
                with patch.object(cuda_joint_attention, "fits", lambda *_: False):
                    two, two_error = timed(calls, want)
                one, error = timed(calls, want)
                found = (model.name, sequences, context, two, one)
                record = dict(zip(("model", "T", "keys", *FORMS), found, strict=True))
                record |= {"floor us": round(inputs.bytes_read / bandwidth, 1)}
                records.append(record | {"errors": [two_error, error]})
    if options.json:
        more = {"copy TB/s": round(bandwidth / 1e6, 2), "unit": "us"}
        options.json.write_text(json.dumps(about() | more | {"records": records}, indent=1) + "\n")
    print(f"copy: {bandwidth / 1e6:.2f} TB/s on {torch.cuda.get_device_name()}; microseconds")
    for record in records:
        print("  ".join(f"{key} {value}" for key, value in record.items()))


if __name__ == "__main__":
    main()
