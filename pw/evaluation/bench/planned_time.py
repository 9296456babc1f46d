"""What planned widths cost in time at equal bytes, by count: from times of uniform widths alone.

    python -m pw.evaluation.bench.planned_time CONFIG.json --times 2=81.5 3=89.1 4=118 8=248

A kernel that ran each block as fast as blocks of its width run among their like would take the mean
of the uniform times, weighted by the plan. So no kernel that is measured against uniform widths can
make a plan faster than that. Each further line gives time a price beside damage: what less time
would cost of what the plan wins. Losses are those of dummy weights (`pw.engine.start.dummy`).

With few tokens the blocks of a layer run side by side, and it takes as long as the widest of them:
`--together 4` says what that comes to for four of the plan's blocks, taken at random.

Axes: n blocks, W widths.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pw.blocks import MODULES
from pw.engine.start.dummy import DummySource
from pw.models.stand_in import write_folder
from pw_kernels.bitplane import lut_bytes, plane_bytes

PRICES = (0.0, 1e-3, 3e-3, 5e-3, 7e-3)  # of a microsecond of a layer, nats a token
_HALVINGS = 80

Floats = NDArray[np.float64]


class Blocks(NamedTuple):
    """All blocks of a model."""

    widths: NDArray[np.int64]  # [W] bits
    sizes: Floats  # [n, W] bytes
    damage: Floats  # [n, W] nats a token, over the widest width
    time: Floats  # [n, W] microseconds of a layer


class Line(NamedTuple):
    """What a plan in given bytes comes to."""

    price: float
    damage: float
    time: float
    counts: list[int]  # blocks by width


def blocks_of(config: Path, times: dict[int, float]) -> Blocks:
    """Blocks in the shape of a config.

    Args:
        config: A model's config.json.
        times: By width, microseconds of a layer whose blocks all have it. Widths between count as
            on a line.
    """
    with tempfile.TemporaryDirectory() as temporary:
        write_folder(config, Path(temporary) / "model", {})
        source = DummySource(Path(temporary) / "model")
        geometry = source.geometry
        table = source.table("sensitivity")
    widths = np.arange(source.min_bits, source.max_bits + 1)
    shapes = [geometry.shape(module) for module in MODULES]
    sizes = [
        [bits * plane_bytes(s.rows, s.cols) + lut_bytes(s.rows, bits) for bits in widths.tolist()]
        for s in shapes
    ]
    pairs = geometry.blocks // len(MODULES)
    losses = table.arrays["output_gradient"].reshape(geometry.blocks, len(widths))
    known = sorted(times)
    of_layer = np.interp(widths, known, [times[bits] for bits in known])
    weights = np.array([shape.weights for shape in shapes], dtype=np.float64)
    shares = np.tile(weights / weights.sum(), pairs) / pairs
    return Blocks(
        widths,
        np.tile(np.array(sizes, dtype=np.float64), (pairs, 1)),
        losses - losses[:, -1:],
        shares[:, None] * of_layer,
    )


def plan(blocks: Blocks, num_bytes: float, price: float) -> Line:
    """Widths of least damage plus price of time in so many bytes, by bisection of bytes' price."""
    rows, cost = np.arange(len(blocks.sizes)), blocks.damage + price * blocks.time

    def chosen(of_byte: float) -> NDArray[np.int64]:
        best: NDArray[np.int64] = (cost + of_byte * blocks.sizes).argmin(1)
        return best

    low, high = 0.0, 1e-12
    while blocks.sizes[rows, chosen(high)].sum() > num_bytes:
        high *= 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if blocks.sizes[rows, chosen(middle)].sum() > num_bytes:
            low = middle
        else:
            high = middle
    index = chosen(high)
    return Line(
        price,
        float(blocks.damage[rows, index].sum()),
        float(blocks.time[rows, index].sum()),
        np.bincount(index, minlength=len(blocks.widths)).tolist(),
    )


def widest_of(counts: Sequence[int], times: Sequence[float], together: int) -> float:
    """Expected time of the widest of some blocks.

    Args:
        counts: [W] blocks of each width.
        times: [W] of a layer of each, never falling.
        together: Blocks taken at random.
    """
    below = np.cumsum(counts) / sum(counts)
    return float(np.diff(below**together, prepend=0.0) @ np.array(times))


def table(blocks: Blocks, bits: int, prices: Sequence[float] = PRICES) -> str:
    """Plans in the bytes of a uniform width, for reading."""
    place = int(np.searchsorted(blocks.widths, bits))
    damage, time = float(blocks.damage[:, place].sum()), float(blocks.time[:, place].sum())
    found = [plan(blocks, float(blocks.sizes[:, place].sum()), price) for price in prices]
    won = damage - found[0].damage
    lines = [
        f"| price of a microsecond | damage over uniform {bits} | of the plan's win | time over it "
        f"| blocks of {', '.join(map(str, blocks.widths.tolist()))} bits |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {line.price:g} | {line.damage / damage:.3f} | {(damage - line.damage) / won:.3f} "
        f"| {line.time / time:.3f} | {', '.join(map(str, line.counts))} |"
        for line in found
    ]
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("--bits", type=int, default=3, help="whose bytes the plans have")
    parser.add_argument("--times", nargs="+", required=True, help="<bits>=<us> of uniform layers")
    parser.add_argument("--together", type=int, help="blocks of a layer, side by side")
    options = parser.parse_args()
    pairs = (text.partition("=") for text in options.times)
    times = {int(bits): float(microseconds) for bits, _, microseconds in pairs}
    blocks, bits = blocks_of(options.config, times), options.bits
    print(table(blocks, bits))
    if options.together:
        of_layer = blocks.time.sum(0)
        place = int(np.searchsorted(blocks.widths, bits))
        line = plan(blocks, float(blocks.sizes[:, place].sum()), 0.0)
        widest = widest_of(line.counts, of_layer.tolist(), options.together)
        print(
            f"\nthe widest of {options.together} blocks: {widest:.2f} us, uniform {bits} bits "
            f"{of_layer[place]:.2f}: {widest / of_layer[place]:.3f}"
        )


if __name__ == "__main__":
    main()
